"""What is trained."""

from fedbudget.models.base import Model, loss_over
from fedbudget.models.function import FunctionModel
from fedbudget.models.kmeans import KMeans
from fedbudget.models.linear import LinearRegression
from fedbudget.models.softmax import Softmax
from fedbudget.models.squared_svm import SquaredSvm

__all__ = ["FunctionModel", "KMeans", "LinearRegression", "Model", "Softmax", "SquaredSvm", "loss_over"]
