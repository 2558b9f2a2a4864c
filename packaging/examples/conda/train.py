"""Fits random forests of several sizes to handwritten digits and keeps the best one in ./outputs."""

import argparse
import json
import pathlib
import sys

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--trees", type=int, nargs="+", default=[20])
arguments = parser.parse_args()
print(f"Python {sys.version.split()[0]} of {sys.prefix}", flush=True)

import joblib  # noqa: E402  the first line is on the screen before these are loaded
import mlflow  # noqa: E402
import sklearn  # noqa: E402
from sklearn.datasets import load_digits  # noqa: E402
from sklearn.ensemble import RandomForestClassifier  # noqa: E402
from sklearn.model_selection import train_test_split  # noqa: E402

images, digits = load_digits(return_X_y=True)
train_x, test_x, train_y, test_y = train_test_split(images, digits, test_size=0.25, random_state=0)
print(f"scikit-learn {sklearn.__version__}: {len(train_x)} images to learn from, {len(test_x)} to test", flush=True)

best = None
for step, trees in enumerate(arguments.trees):
    model = RandomForestClassifier(n_estimators=trees, random_state=0).fit(train_x, train_y)
    accuracy = model.score(test_x, test_y)
    mlflow.log_metrics({"trees": trees, "accuracy": accuracy}, step=step)
    print(f"{trees:4} trees: accuracy {accuracy:.4f}", flush=True)
    if best is None or accuracy > best["accuracy"]:
        best = {"trees": trees, "accuracy": accuracy, "model": model}

outputs = pathlib.Path("outputs")
joblib.dump(best.pop("model"), outputs / "model.joblib")
(outputs / "best.json").write_text(json.dumps(best, indent=2) + "\n")
print(f"best: {best['trees']} trees", flush=True)
