"""What a run shows of itself: the log, metrics, progress, a picture of the loss."""

from functrain.observe.log import set_log_level as set_log_level
from functrain.observe.metrics import MetricsError as MetricsError
from functrain.observe.metrics import MetricsWriter as MetricsWriter
from functrain.observe.metrics import read_metrics as read_metrics
from functrain.observe.plot import plot_loss as plot_loss
from functrain.observe.progress import make_progress as make_progress
