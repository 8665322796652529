"""A record -> TensorBoard's event file in RUN/dashboards/tensorboard: scalars by step, the settings as hparams, a text.

tensorboard --logdir results shows all runs.  Without torch and tensorflow: the file is written by tensorboard itself.
"""

import shutil
from collections.abc import Iterator
from typing import Any

from bench.record.exporters.dashboards import FOLDER, Exported


def export(exported: Exported, settings: dict[str, Any]) -> dict[str, str]:
    """Returns {"folder"}.  An export of before is replaced."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    folder = exported.folder / FOLDER / "tensorboard"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    writer = EventFileWriter(str(folder))
    try:
        for summary, step, wall_s in _summaries(exported):
            writer.add_event(Event(wall_time=wall_s, step=step, summary=summary))
    finally:
        writer.close()
    for file in folder.iterdir():  # tensorboard writes the machine's name into that of the file
        file.rename(folder / f"events.out.tfevents.{file.name.split('.')[3]}.speedrun")
    return {"folder": f"{FOLDER}/tensorboard"}


def _summaries(exported: Exported) -> Iterator[tuple[Any, int, float]]:
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import summary_v2 as hparams

    points = exported.points or [(0, 0.0, {})]
    (_, start_s, _), (last_step, last_s, _) = points[0], points[-1]
    yield hparams.hparams_pb(exported.settings, trial_id=exported.run["run_id"], start_time_secs=start_s), 0, start_s
    for step, wall_s, values in [*points, (last_step, last_s, exported.final)]:
        if values:
            shown = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
            yield Summary(value=shown), step, wall_s
    yield _text("run", exported.tags), last_step, last_s


def _text(tag: str, words: dict[str, str]) -> Any:
    """A table in Markdown, as TensorBoard's text dashboard shows it."""
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING

    table = "| | |\n|---|---|\n" + "".join(f"| {key} | {value.replace('|', '/')} |\n" for key, value in words.items())
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    tensor = TensorProto(dtype=DT_STRING, string_val=[table.encode()], tensor_shape=shape)
    return Summary(value=[Summary.Value(tag=tag, metadata=metadata, tensor=tensor)])
