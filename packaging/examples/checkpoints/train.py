"""Fits a line by gradient descent, saves its state after each step, and goes on from it when it is started again."""

import argparse
import json
import os
import signal
import sys
import time

STATE = "outputs/state.json"
POINTS = [(x / 10, 3 * x / 10 + 1) for x in range(10)]


def load():
    try:
        with open(STATE) as file:
            return json.load(file)
    except FileNotFoundError:
        return {"step": 0, "slope": 0.0, "offset": 0.0, "starts": []}


def save(state):
    # Whole or not at all: the file may be copied at any moment.
    with open(STATE + ".new", "w") as file:
        json.dump(state, file)
    os.replace(STATE + ".new", STATE)


def learn(state, rate=0.2):
    errors = [(state["slope"] * x + state["offset"] - y, x) for x, y in POINTS]
    state["slope"] -= rate * sum(error * x for error, x in errors) / len(POINTS)
    state["offset"] -= rate * sum(error for error, _ in errors) / len(POINTS)
    return sum(error * error for error, _ in errors) / len(POINTS)


def told(number, frame):
    """The machine will be taken away, or somebody ends the job."""
    path = os.environ.get("AGENTD_PREEMPTION_FILE", "")
    if os.path.exists(path):
        with open(path) as file:
            print("told:", file.read().strip(), flush=True)
    sys.exit(0)  # the state of the last step is saved


def main():
    words = argparse.ArgumentParser()
    words.add_argument("--steps", type=int, default=40)
    words.add_argument("--seconds", type=float, default=0.1)
    given = words.parse_args()
    signal.signal(signal.SIGTERM, told)
    state = load()
    state["starts"].append(state["step"])
    print("begins at step", state["step"], flush=True)
    while state["step"] < given.steps:
        loss = learn(state)
        state["step"] += 1
        save(state)
        with open(os.environ.get("AGENTD_METRICS", os.devnull), "a") as metrics:
            metrics.write(json.dumps({"metric": "loss", "value": loss, "step": state["step"]}) + "\n")
        time.sleep(given.seconds)
    print("done after", len(state["starts"]), "starts:", state["starts"])


if __name__ == "__main__":
    main()
