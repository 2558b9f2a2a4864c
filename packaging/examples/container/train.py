"""Fits a ridge regression for each alpha, without any package, and keeps the best model in ./outputs."""

import argparse
import json
import math
import os
import pathlib
import random
import sys

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--alphas", type=float, nargs="+", default=[1.0])
arguments = parser.parse_args()
print(f"Python {sys.version.split()[0]}: fitting {len(arguments.alphas)} models", flush=True)

chance = random.Random(0)
TRUTH = [3.0, -2.0, 0.5, 0.0]


def sample():
    features = [chance.uniform(-1, 1) for _ in TRUTH]
    return features, math.fsum(weight * value for weight, value in zip(TRUTH, features)) + chance.gauss(0, 0.3)


def fit(rows, alpha):
    """The normal equations, solved by elimination."""
    size = len(TRUTH)
    table = [
        [math.fsum(x[i] * x[j] for x, _ in rows) + (alpha if i == j else 0.0) for j in range(size)]
        + [math.fsum(x[i] * y for x, y in rows)]
        for i in range(size)
    ]
    for i in range(size):
        for j in range(size):
            if i != j:
                factor = table[j][i] / table[i][i]
                table[j] = [b - factor * a for a, b in zip(table[i], table[j])]
    return [table[i][size] / table[i][i] for i in range(size)]


def error(weights, rows):
    return math.fsum((y - math.fsum(w * v for w, v in zip(weights, x))) ** 2 for x, y in rows) / len(rows)


def log(step, **metrics):
    """One line a metric; with MLflow in the image, `mlflow.log_metric` does the same."""
    with open(os.environ["AGENTD_METRICS"], "a") as file:
        for name, value in metrics.items():
            file.write(json.dumps({"metric": name, "value": value, "step": step}) + "\n")


learn, test = [sample() for _ in range(400)], [sample() for _ in range(100)]
best = None
for step, alpha in enumerate(arguments.alphas):
    weights = fit(learn, alpha)
    mse = error(weights, test)
    log(step, alpha=alpha, mse=mse)
    print(f"alpha {alpha:<6} mse {mse:8.5f}", flush=True)
    if best is None or mse < best["mse"]:
        best = {"alpha": alpha, "mse": mse, "weights": weights}

pathlib.Path("outputs/best.json").write_text(json.dumps(best, indent=2) + "\n")
print(f"best alpha: {best['alpha']}", flush=True)
