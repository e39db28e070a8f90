"""Train the paper's SVM on handwritten digits, spread unevenly over five nodes, in 15 simulated seconds."""

import fedbudget

result = fedbudget.train(model="svm", dataset="digits", nodes=5, case=2, budget="time=15s")
print(f"loss {result.loss:.4f}, accuracy {result.accuracy:.4f}, average τ {result.average_tau:.1f}")
