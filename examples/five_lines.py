"""Train the paper's SVM on handwritten digits, spread unevenly over five nodes.

The budget is 15 simulated seconds.
"""

import fedbudget

result = fedbudget.train(model="svm", dataset="digits", nodes=5, case=2, budget="time=15s")
print(f"loss {result.loss:.4f}, accuracy {result.accuracy:.4f}", end=", ")
print(f"average τ {result.average_tau:.1f}")
