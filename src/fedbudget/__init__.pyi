# The public names of fedbudget and their modules. __init__.py reads this list too.
from fedbudget.budget.budget import Budget as Budget
from fedbudget.budget.control import (
    AdaptiveTau as AdaptiveTau,
    BalancedTau as BalancedTau,
    ControlInputs as ControlInputs,
    Controller as Controller,
    Decision as Decision,
    Estimates as Estimates,
    FixedTau as FixedTau,
    Reason as Reason,
)
from fedbudget.data.dataset import Dataset as Dataset
from fedbudget.data.describe import (
    ColumnSummary as ColumnSummary,
    Description as Description,
    describe as describe,
)
from fedbudget.errors import (
    FedbudgetError as FedbudgetError,
    UserError as UserError,
    WorkError as WorkError,
)
from fedbudget.forecasts.forecast import (
    Forecast as Forecast,
    ForecastReport as ForecastReport,
    Interval as Interval,
    TargetCost as TargetCost,
    forecast as forecast,
)
from fedbudget.models.own import FunctionModel as FunctionModel
from fedbudget.models.torch.model import TorchModel as TorchModel
from fedbudget.estimators import (
    FedClassifier as FedClassifier,
    FedKMeans as FedKMeans,
    FedRegressor as FedRegressor,
)
from fedbudget.api import join as join, serve as serve, train as train
from fedbudget.protocol.combine import (
    CappingRule as CappingRule,
    ClippedMean as ClippedMean,
    CombineRule as CombineRule,
    CoordinateMedian as CoordinateMedian,
    TrimmedMean as TrimmedMean,
    WeightedMean as WeightedMean,
)
from fedbudget.protocol.features.feature import (
    Feature as Feature,
    FeatureState as FeatureState,
    LocalRound as LocalRound,
    NodeMemory as NodeMemory,
    Reported as Reported,
    RoundResult as RoundResult,
    register_feature as register_feature,
)
from fedbudget.protocol.messages import Report as Report, RoundPart as RoundPart
from fedbudget.protocol.site_figures import (
    SiteFigure as SiteFigure,
    SiteFigures as SiteFigures,
)
from fedbudget.protocol.update import (
    Accelerate as Accelerate,
    Average as Average,
    FedAdam as FedAdam,
    FedExP as FedExP,
    FedYogi as FedYogi,
    KMeansSplit as KMeansSplit,
    KMeansSplitState as KMeansSplitState,
    Motion as Motion,
    MovingRule as MovingRule,
    Prodigy as Prodigy,
    RestartingRule as RestartingRule,
    ServerMomentum as ServerMomentum,
    UpdateRule as UpdateRule,
)
from fedbudget.runs.record import RoundRecord as RoundRecord
from fedbudget.settings.settings import Settings as Settings
from fedbudget.budget.step_size import (
    AutoStep as AutoStep,
    AutoStepState as AutoStepState,
    FallingStep as FallingStep,
    FixedStep as FixedStep,
    SearchedStep as SearchedStep,
    SearchedStepState as SearchedStepState,
    StepSize as StepSize,
    StepSizeInputs as StepSizeInputs,
    StepSizeState as StepSizeState,
)
from fedbudget.result import Result as Result, RunInterrupted as RunInterrupted
from fedbudget.trained.export import export as export
from fedbudget.trained.model import TrainedModel as TrainedModel, load as load

__all__: list[str]
__version__: str
