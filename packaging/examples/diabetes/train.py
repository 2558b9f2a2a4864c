"""Fits a ridge regression for each alpha and keeps the best model in ./outputs."""

import argparse
import json
import pathlib

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--alphas", type=float, nargs="+", default=[1.0])
arguments = parser.parse_args()
print(f"fitting {len(arguments.alphas)} models", flush=True)

import joblib  # noqa: E402  the first line is on the screen before these are loaded
import mlflow  # noqa: E402
from sklearn.datasets import load_diabetes  # noqa: E402
from sklearn.linear_model import Ridge  # noqa: E402
from sklearn.metrics import mean_squared_error, r2_score  # noqa: E402
from sklearn.model_selection import train_test_split  # noqa: E402

features, target = load_diabetes(return_X_y=True)
train_x, test_x, train_y, test_y = train_test_split(features, target, test_size=0.2, random_state=0)
print(f"{len(train_x)} rows to learn from, {len(test_x)} to test", flush=True)

best = None
for step, alpha in enumerate(arguments.alphas):
    model = Ridge(alpha=alpha).fit(train_x, train_y)
    predicted = model.predict(test_x)
    mse, r2 = mean_squared_error(test_y, predicted), r2_score(test_y, predicted)
    mlflow.log_metrics({"alpha": alpha, "mse": mse, "r2": r2}, step=step)
    print(f"alpha {alpha:<6} mse {mse:8.2f}  r2 {r2:.4f}", flush=True)
    if best is None or mse < best["mse"]:
        best = {"alpha": alpha, "mse": mse, "r2": r2, "model": model}

outputs = pathlib.Path("outputs")
joblib.dump(best.pop("model"), outputs / "model.joblib")
(outputs / "best.json").write_text(json.dumps(best, indent=2) + "\n")
print(f"best alpha: {best['alpha']}", flush=True)
