"""TensorBoard's table of runs, as its own plugin reads it."""

from tensorboard.backend.event_processing import data_provider, plugin_event_multiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins import base_plugin
from tensorboard.plugins.hparams import api_pb2, backend_context, list_session_groups

from fedsim.tuning.board import write_session

STATUSES = ("STATUS_SUCCESS", "STATUS_FAILURE")


def board(directory, metric, statuses=STATUSES):
    """(columns of settings, of metrics, {settings as text: value of `metric`})."""
    files = plugin_event_multiplexer.EventMultiplexer()
    files.AddRunsFromDirectory(str(directory))
    files.Reload()
    provider = data_provider.MultiplexerDataProvider(files, str(directory))
    context = base_plugin.TBContext(logdir=str(directory), data_provider=provider)
    backend, request = backend_context.Context(context), RequestContext()
    content = backend.hparams_metadata(request, "x")
    experiment = backend.experiment_from_metadata(request, "x", True, content, [])
    asked = api_pb2.ListSessionGroupsRequest(
        start_index=0,
        slice_size=100,
        allowed_statuses=[api_pb2.Status.Value(name) for name in statuses],
    )
    asked.col_params.add(metric=api_pb2.MetricName(tag=metric))
    groups = list_session_groups.Handler(request, backend, "x", asked).run().session_groups
    rows = []
    for group in groups:
        shown = {
            name: getattr(value, value.WhichOneof("kind")) for name, value in group.hparams.items()
        }
        rows.append((shown, [v.value for v in group.metric_values if v.name.tag == metric]))
    settings = {info.name for info in experiment.hparam_infos}
    return settings, {info.name.tag for info in experiment.metric_infos}, rows


def test_settings_and_last_values_are_columns(tmp_path):
    settings = [
        {"algorithm": "els", "epsilon": 1, "group_size": None, "seed": True},
        {"algorithm": "uls", "epsilon": 0.5, "group_size": 4, "seed": False},
    ]
    for _ in range(2):  # written again, it replaces what was there
        for number, each in enumerate(settings):
            records = [{"step": s, "eval/loss": 5.0 - s - number} for s in (0, 2)]
            write_session(tmp_path / str(number), each, records, succeeded=number == 0)
    columns, metrics, rows = board(tmp_path, "eval/loss")
    assert columns == {"algorithm", "epsilon", "group_size", "seed"} and metrics == {"eval/loss"}
    assert sorted(rows, key=lambda row: row[0]["algorithm"]) == [
        ({"algorithm": "els", "epsilon": 1.0, "group_size": "default", "seed": True}, [3.0]),
        ({"algorithm": "uls", "epsilon": 0.5, "group_size": 4.0, "seed": False}, [2.0]),
    ]
    assert len(board(tmp_path, "eval/loss", STATUSES[:1])[2]) == 1
