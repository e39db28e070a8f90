"""Export of a trained model to ONNX: from raw features to predictions.

The graph has three parts. Only the middle one depends on the model:

    features -> standardise, scale -> numbers
    numbers  -> the model          -> outputs
    outputs  -> their meaning      -> prediction, probabilities, ...

A model trained on tables has one input per column, [samples, 1]. Numbers are float64, with
NaN for a missing value. Categories are strings, empty for a missing value.

Other models have one input, `features`. It is float64 if features are standardised, as in
training: in float32, a large feature that hardly changes would lose its digits. It is
int64 for integers of a PyTorch module, and float32 otherwise.
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

OPSET = 19
"""The first opset that compares strings."""
_IR = 9
"""Version of the file format that programs with this opset can read."""

_OWN = "fedbudget/"
"""Prefix of internal names, so that none is the name of a column."""
_NUMBERS = f"{_OWN}numbers"
_OUTPUTS = f"{_OWN}outputs"
_SAMPLES = "samples"
"""Name of the dimension that can have any size."""
_Constant = np.ndarray[Any, Any] | np.number[Any]


class _Graph:
    """Nodes of a graph under construction, with their constants."""

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
        """Add a node, and return the name of its output. Arrays become constants."""
        names = [each if isinstance(each, str) else self._constant(each) for each in inputs]
        output = output or f"{_OWN}{len(self.nodes)}"
        self.nodes.append(helper.make_node(operation, names, [output], **options))
        return output

    def show(self, name: str, kind: int, *shape: int) -> None:
        """Make a result an output of the graph, [samples, ...]."""
        self.outputs.append(helper.make_tensor_value_info(name, kind, (_SAMPLES, *shape)))

    def _constant(self, value: _Constant) -> str:
        name = f"{_OWN}constant {len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(value), name))
        return name


def to_onnx(trained: TrainedModel) -> bytes:
    """Return an ONNX file."""
    samples = trained.samples
    model = trained.model
    if samples.store is not None:
        raise UserError(
            f"{trained.name} was trained on samples that are not arrays, so their shape is "
            "unknown; export the module, TorchModel.trained(w), with torch.onnx.export"
        )
    graph = _Graph()
    inputs = _numbers(graph, samples)
    outputs = _own_graph(graph, model, trained.w, samples)
    _answers(graph, trained.meaning(outputs), outputs)
    both = {each.name for each in inputs} & {each.name for each in graph.outputs}
    if both:
        raise UserError(
            f"column {both.pop()} has the name of an output of the graph: rename the column"
        )
    whole = helper.make_graph(
        graph.nodes, "fedbudget", inputs, graph.outputs, graph.constants
    )
    file: onnx.ModelProto = helper.make_model(
        whole, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=_IR
    )
    about = {
        "model": trained.name,
        "features": json.dumps(trained.feature_names),
        "classes": json.dumps(trained.classes),
        **trained.privacy_metadata,
    }
    helper.set_model_props(file, about)
    onnx.checker.check_model(file, full_check=True)
    return bytes(file.SerializeToString())


def _numbers(graph: _Graph, samples: Dataset) -> list[ValueInfoProto]:
    """Add the conversion of raw features to `numbers`; return the graph's inputs."""
    standard = samples.standardization
    layout = samples.layout
    if layout is None:
        kind = TensorProto.INT64 if samples.integers else TensorProto.FLOAT
        if standard is not None:
            kind = TensorProto.DOUBLE
        last = "features"
        inputs = [helper.make_tensor_value_info(last, kind, (_SAMPLES, samples.features))]
    else:
        inputs = []
        for column in layout.columns:
            kind = TensorProto.DOUBLE if column.categories is None else TensorProto.STRING
            inputs.append(helper.make_tensor_value_info(column.name, kind, (_SAMPLES, 1)))
        encoded = [_encoded(graph, column) for column in layout.columns]
        last = graph.add("Concat", encoded, axis=1)
    if standard is not None:
        centred = graph.add("Sub", [last, standard.mean])
        scaled = graph.add("Div", [centred, standard.deviation])
        last = graph.add("Cast", [scaled], to=TensorProto.FLOAT)
    elif samples.scale != 1:
        last = graph.add("Mul", [last, np.float32(samples.scale)])
    shape = np.array([-1, *(samples.shape or (samples.features,))], np.int64)
    graph.add("Reshape", [last, shape], _NUMBERS)
    return inputs


def _encoded(graph: _Graph, column: LayoutColumn) -> str:
    """Add the encoding of a column, [samples, features], as in `LayoutColumn.encode`."""
    name = column.name
    if column.categories is None:
        if column.fill is not None:
            missing = graph.add("IsNaN", [name])
            name = graph.add("Where", [missing, np.float64(column.fill), name])
        if column.range is not None:
            name = graph.add("Clip", [name, *map(np.float64, column.range)])
        return name
    if column.fill is not None:
        missing = graph.add("Equal", [name, np.array([""], object)])
        name = graph.add("Where", [missing, np.array([column.fill], object), name])
    listed = column.categories if column.other is None else column.categories[:-1]
    equal = graph.add("Equal", [name, np.array([listed], object)])
    encoded = graph.add("Cast", [equal], to=TensorProto.DOUBLE)
    if column.other is None:
        return encoded
    known = graph.add("ReduceMax", [encoded, np.array([1])])
    other = graph.add("Sub", [np.float64(1.0), known])
    return graph.add("Concat", [encoded, other], axis=1)


def _own_graph(graph: _Graph, model: Model, w: Float32, samples: Dataset) -> int:
    """Add the model, from `numbers` to `outputs`; return the outputs per sample."""
    tensors = NamedTensors.of(model).split(w)
    if not isinstance(model, ScoreModel | Softmax | KMeans):
        return _torch_graph(graph, model, w, samples)
    rows = graph.add("Flatten", [_NUMBERS])
    if isinstance(model, ScoreModel):
        graph.add("MatMul", [rows, tensors["weight"][:, None]], _OUTPUTS)
        return 1
    if isinstance(model, Softmax):
        graph.add("Gemm", [rows, *tensors.values()], _OUTPUTS, transB=1)
        return model.classes
    apart = graph.add("Unsqueeze", [rows, np.array([1])])
    difference = graph.add("Sub", [apart, tensors["centres"][None]])
    distance = graph.add("ReduceSumSquare", [difference, np.array([2])], keepdims=0)
    graph.add("Mul", [distance, np.float32(-0.5)], _OUTPUTS)
    return model.clusters


def _torch_graph(graph: _Graph, model: Model, w: Float32, samples: Dataset) -> int:
    """Add a PyTorch module, exported by PyTorch."""
    import torch

    from fedbudget.trained.torch import example, module_of

    module = module_of(model, w)
    numbers = example(samples)
    file = io.BytesIO()
    failure = f"{model.name} cannot be exported to ONNX"
    with warnings.catch_warnings(), as_user_error(failure):
        # PyTorch advertises its newer exporter, which needs another package.
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module,
            (numbers,),
            file,  # type: ignore[arg-type] # PyTorch accepts it
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
    """Add the meaning of the outputs, as the outputs of the graph."""
    if meaning.kind == "value":
        wide = graph.add("Cast", [_OUTPUTS], to=TensorProto.DOUBLE)
        scaled = graph.add("Mul", [wide, np.float64(meaning.deviation)])
        values = graph.add("Add", [scaled, np.float64(meaning.mean)])
        if outputs == 1:
            graph.add("Squeeze", [values, np.array([1])], "prediction")
            graph.show("prediction", TensorProto.DOUBLE)
        else:
            graph.add("Identity", [values], "prediction")
            graph.show("prediction", TensorProto.DOUBLE, outputs)
        return
    if meaning.kind == "sign":
        score = graph.add("Squeeze", [_OUTPUTS, np.array([1])], "score")
        second = graph.add("GreaterOrEqual", [score, np.float32(0)])
        number = graph.add("Cast", [second], to=TensorProto.INT64)
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
