"""What the paper's evaluation says, in its own words; every claim that is judged names the sentence it is from."""

# Loss and accuracy values
CLOSE = "We see that the proposed approach performs close to the optimal point for all cases and all models"
CLOSE_ACCURACY = (
    "Our proposed solution (represented by a single marker for each case) gives an average τ and loss/accuracy that is "
    "close to the optimum in all cases."
)
DIFFERENT = (
    "We also see that the (empirically) optimal value of τ is different for different cases and models, so a fixed "
    "value of τ does not work well for all cases."
)
DISTRIBUTED = (
    "In some cases, the distributed approach can perform better than the centralized approach, because for a given "
    "amount of time budget, federated learning is able to make use of the computation resource at multiple nodes."
)
CASE_3 = (
    "For DGD approaches, Case 3 does not perform as well as Case 1, because the amount of data at each node in Case 3 "
    "is larger than that in Case 1"
)

# Number of nodes
NODES = "Our proposed approach performs better than or similar to the fixed τ=10 baseline in all cases"

# Time of an aggregation
LARGER_TAU = (
    "We can see that as one would intuitively expect, a larger global aggregation time generally results in a larger "
    "τ* for the proposed algorithm"
)
SLIGHTLY_DECREASES = (
    "The fact that τ* slightly decreases when the adjustment factor is large is because in this case, the global "
    "aggregation time is so large that only a few rounds of global aggregation can be performed before reaching the "
    "resource budget"
)
BETTER = "Comparing to the fixed τ=10 baseline, the proposed algorithm performs better in (almost) all cases."

# Budget
DECREASES = (
    "We see that except for Case 3 where all nodes have the same dataset, the value of τ* of the proposed algorithm "
    "decreases with the total time budget."
)
BUDGET = (
    "We also see that the proposed algorithm performs better than or similar to the fixed τ=10 baseline in all cases."
)

# A single run
STABLE = (
    "We see that the value of τ* remains stable after an initial adaptation period, showing that the control "
    "algorithm is stable."
)
END = "The value of τ* decreases at the end due to adjustment caused by the system reaching the resource budget"
DELTA = (
    "As expected, the gradient deviation δ is larger for Cases 2 and 4 where the data samples at different nodes are "
    "non-uniform."
)
RHO_AND_BETA = (
    "The same is observed for ρ and β, indicating that the model parameter w is in a less smooth region for Cases 2 "
    "and 4."
)
ZERO = "Thus, the estimated ρ and β values are zero by definition"
LARGER_C = (
    "Case 3 of SVM (DGD) has a much larger value of c because it processes more data than in other cases and thus "
    "takes more time, as explained before."
)
FLUCTUATES = "The value of b exhibits fluctuations because of the randomness of the wireless channel."

# Control parameter φ
ORDER = "We see that the relationship among τ* in different cases is mostly maintained with different values of φ."
LINEAR = "The value of τ* decreases approximately linearly with log φ"
SAME = "For Case 3, τ* remains the same with different φ"
SMALL_CHANGES = "We also see that small changes of φ does not change τ* much"

# Asynchronous descent
MUCH_WORSE = (
    "We see that the performance of asynchronous gradient descent is much worse than synchronous gradient descent for "
    "non-uniform data distribution in Cases 2 and 4, with slower convergence, sudden changes (indicating instability "
    "of the training process), and convergence to higher loss and lower accuracy values."
)
SIMILAR = (
    "With uniform data distribution (Cases 1 and 3), asynchronous gradient descent performs similar as or slightly "
    "better than synchronous gradient descent"
)
