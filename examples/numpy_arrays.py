"""Train on numpy arrays: one (x, y) for each of eight hospitals, and one to test."""

import numpy as np
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler

import fedbudget

x, y = load_breast_cancer(return_X_y=True)
x_train, x_test, y_train, y_test = train_test_split(x, y, test_size=0.2, random_state=0)
scaler = StandardScaler().fit(x_train)
x_train, x_test = scaler.transform(x_train), scaler.transform(x_test)

hospitals = list(zip(np.array_split(x_train, 8), np.array_split(y_train, 8), strict=True))
result = fedbudget.train(
    shards=hospitals,
    test=(x_test, y_test),
    model="svm",
    budget=["time=15s", "bytes=60kB"],
)
print(f"{len(hospitals)} nodes, loss {result.loss:.4f}", end=", ")
print(f"accuracy {result.accuracy:.3f}, stopped by {result.stopped_by}")
