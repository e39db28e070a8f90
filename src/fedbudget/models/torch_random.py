"""PyTorch's random numbers are one sequence for all threads: who seeds it and draws from it does so alone.

Several nodes may be threads of one program, and modules that they make at the same time would get each other's numbers.
"""

from threading import RLock

ALONE = RLock()
"""Of all models; a module may be made of others that are made by whoever has it already."""
