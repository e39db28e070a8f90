"""A trained model as ONNX: raw features in, and what they mean out; standardised and scaled within.

The graph has three parts, of which only the middle depends on the model:

    features --standardise, scale--> numbers --the model--> outputs --what they mean--> prediction, probabilities ...

A model that was trained on tables has an input for each column, [samples, 1], of which the features are made within:
numbers as float64, NaN where one is missing, and categories as texts, empty where one is missing.

Others have one input, `features`: float64 where these are standardised, as it was done while training, because a
float32 of a large feature that hardly changes would be another one; int64 where they are whole numbers for a PyTorch
module; and otherwise float32.
"""

import io
import json
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedbudget.arrays import Float32
from fedbudget.data.dataset import Dataset
from fedbudget.data.tables import LayoutColumn
from fedbudget.errors import UserError, as_user_error, requires_package
from fedbudget.models.base import Model
from fedbudget.models.builtin import KMeans, ScoreModel, Softmax
from fedbudget.models.description import NamedTensors
from fedbudget.trained.model import Meaning, TrainedModel

with requires_package("ONNX", "onnx"):
    import onnx
    from onnx import NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

OPSET = 19  # the first that compares texts
_IR = 9  # of the file, which programs that know this opset can read

_OWN = "fedbudget/"  # begins the names of what is within, so that none is a column's
_NUMBERS = f"{_OWN}numbers"
_OUTPUTS = f"{_OWN}outputs"
_SAMPLES = "samples"  # how many, which any number may be
_Constant = np.ndarray[Any, Any] | np.number[Any]


class _Graph:
    """Nodes in the making, with their constants."""

    def __init__(self) -> None:
        self.nodes: list[NodeProto] = []
        self.constants: list[TensorProto] = []
        self.outputs: list[ValueInfoProto] = []

    def add(
        self,
        operation: str,
        inputs: Sequence[str | _Constant],
        output: str = "",
        **options: Any,
    ) -> str:
        """A node; arrays among its inputs become constants. Gives the name of its output."""
        names = [each if isinstance(each, str) else self._constant(each) for each in inputs]
        output = output or f"{_OWN}{len(self.nodes)}"
        self.nodes.append(helper.make_node(operation, names, [output], **options))
        return output

    def show(self, name: str, kind: int, *shape: int) -> None:
        """Makes it one of the graph's outputs, [samples, ...]."""
        self.outputs.append(helper.make_tensor_value_info(name, kind, (_SAMPLES, *shape)))

    def _constant(self, value: _Constant) -> str:
        name = f"{_OWN}constant {len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(value), name))
        return name


def to_onnx(trained: TrainedModel) -> bytes:
    """A file of ONNX."""
    samples = trained.samples
    model = trained.model
    if samples.store is not None:
        raise UserError(
            f"{trained.name} was trained on samples that are no arrays, which have no shape to export for; export the "
            "module itself, TorchModel.trained(w), with torch.onnx.export"
        )
    graph = _Graph()
    inputs = _numbers(graph, samples)
    outputs = _own_graph(graph, model, trained.w, samples)
    _answers(graph, trained.meaning(outputs), outputs)
    if twice := {each.name for each in inputs} & {each.name for each in graph.outputs}:
        raise UserError(
            f"a column is called {twice.pop()}, as an output of the graph is: it needs another name"
        )
    made = helper.make_graph(
        graph.nodes, "fedbudget", inputs, graph.outputs, graph.constants
    )
    found: onnx.ModelProto = helper.make_model(
        made, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=_IR
    )
    about = {"features": trained.feature_names, "classes": trained.classes}
    helper.set_model_props(
        found,
        {"model": trained.name, **{name: json.dumps(each) for name, each in about.items()}},
    )
    onnx.checker.check_model(found, full_check=True)
    return bytes(found.SerializeToString())


def _numbers(graph: _Graph, samples: Dataset) -> list[ValueInfoProto]:
    """From features as they are outside to those that the model sees; gives the graph's inputs."""
    how = samples.standardization
    layout = samples.layout
    if layout is None:
        kind = TensorProto.INT64 if samples.integers else TensorProto.FLOAT
        last = "features"
        kind = kind if how is None else TensorProto.DOUBLE
        inputs = [helper.make_tensor_value_info(last, kind, (_SAMPLES, samples.features))]
    else:
        inputs = [_column_input(column) for column in layout.columns]
        last = graph.add(
            "Concat", [_encoded(graph, column) for column in layout.columns], axis=1
        )
    if how is not None:
        standardised = graph.add("Div", [graph.add("Sub", [last, how.mean]), how.deviation])
        last = graph.add("Cast", [standardised], to=TensorProto.FLOAT)
    elif samples.scale != 1:
        last = graph.add("Mul", [last, np.float32(samples.scale)])
    graph.add(
        "Reshape",
        [last, np.array([-1, *(samples.shape or (samples.features,))], np.int64)],
        _NUMBERS,
    )
    return inputs


def _column_input(column: LayoutColumn) -> ValueInfoProto:
    kind = TensorProto.DOUBLE if column.categories is None else TensorProto.STRING
    return helper.make_tensor_value_info(column.name, kind, (_SAMPLES, 1))


def _encoded(graph: _Graph, column: LayoutColumn) -> str:
    """The features of one column, [samples, features]; as `LayoutColumn.encode` makes them."""
    if column.categories is None:
        missing = [] if column.fill is None else [graph.add("IsNaN", [column.name])]
        return (
            graph.add("Where", [*missing, np.float64(column.fill), column.name])
            if missing
            else column.name
        )
    name = column.name
    if column.fill is not None:
        missing = [graph.add("Equal", [name, np.array([""], object)])]
        name = graph.add("Where", [*missing, np.array([column.fill], object), name])
    return graph.add(
        "Cast",
        [graph.add("Equal", [name, np.array([column.categories], object)])],
        to=TensorProto.DOUBLE,
    )


def _own_graph(graph: _Graph, model: Model, w: Float32, samples: Dataset) -> int:
    """What the model computes, from `numbers` to `outputs`; gives how many there are for each sample."""
    tensors = NamedTensors.of(model).split(w)
    if isinstance(model, ScoreModel):
        graph.add(
            "MatMul",
            [graph.add("Flatten", [_NUMBERS]), tensors["weight"][:, None]],
            _OUTPUTS,
        )
        return 1
    if isinstance(model, Softmax):
        graph.add(
            "Gemm",
            [graph.add("Flatten", [_NUMBERS]), *tensors.values()],
            _OUTPUTS,
            transB=1,
        )
        return model.classes
    if isinstance(model, KMeans):
        apart = graph.add("Unsqueeze", [graph.add("Flatten", [_NUMBERS]), np.array([1])])
        difference = graph.add("Sub", [apart, tensors["centres"][None]])
        distance = graph.add("ReduceSumSquare", [difference, np.array([2])], keepdims=0)
        graph.add("Mul", [distance, np.float32(-0.5)], _OUTPUTS)
        return model.clusters
    return _torch_graph(graph, model, w, samples)


def _torch_graph(graph: _Graph, model: Model, w: Float32, samples: Dataset) -> int:
    """The same of a PyTorch module, as PyTorch itself exports it."""
    import torch

    from fedbudget.trained.torch import example, module_of

    module = module_of(model, w)
    numbers = example(samples)
    file = io.BytesIO()
    with warnings.catch_warnings(), as_user_error(f"{model.name} cannot be exported to ONNX"):
        warnings.simplefilter(
            "ignore"
        )  # its newer exporter, which it advertises, needs another package
        torch.onnx.export(
            module,
            (numbers,),
            file,  # type: ignore[arg-type] # which it takes all the same
            dynamo=False,
            opset_version=OPSET,
            input_names=[_NUMBERS],
            output_names=[_OUTPUTS],
            dynamic_axes={_NUMBERS: {0: _SAMPLES}, _OUTPUTS: {0: _SAMPLES}},
        )
    own: onnx.GraphProto = onnx.load_model_from_string(file.getvalue()).graph
    graph.nodes += own.node
    graph.constants += own.initializer
    return int(module(numbers).shape[1])


def _answers(graph: _Graph, meaning: Meaning, outputs: int) -> None:
    """What the outputs mean, as the outputs of the graph."""
    if meaning.kind == "value":
        wide = graph.add(
            "Mul",
            [
                graph.add("Cast", [_OUTPUTS], to=TensorProto.DOUBLE),
                np.float64(meaning.deviation),
            ],
        )
        values = graph.add("Add", [wide, np.float64(meaning.mean)])
        one = outputs == 1
        graph.add(
            "Squeeze" if one else "Identity",
            [values, np.array([1])] if one else [values],
            "prediction",
        )
        graph.show("prediction", TensorProto.DOUBLE, *([] if one else [outputs]))
        return
    if meaning.kind == "sign":
        score = graph.add("Squeeze", [_OUTPUTS, np.array([1])], "score")
        number = graph.add(
            "Cast",
            [graph.add("GreaterOrEqual", [score, np.float32(0)])],
            to=TensorProto.INT64,
        )
    else:
        number = graph.add("ArgMax", [_OUTPUTS], axis=1, keepdims=0)
    labels = np.arange(outputs) if meaning.kind == "cluster" else meaning.labels
    whole = labels.dtype.kind == "i"
    graph.add("Gather", [labels if whole else labels.astype(object), number], "prediction")
    graph.show("prediction", TensorProto.INT64 if whole else TensorProto.STRING)
    if meaning.kind == "sign":
        graph.show("score", TensorProto.FLOAT)
    if meaning.kind == "scores":
        graph.add("Softmax", [_OUTPUTS], "probabilities", axis=1)
        graph.show("probabilities", TensorProto.FLOAT, outputs)
        graph.add("Identity", [_OUTPUTS], "scores")
        graph.show("scores", TensorProto.FLOAT, outputs)
