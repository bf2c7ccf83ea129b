"""Reads the file of an offline wandb run: records in LevelDB's log format."""

import json
import struct
from pathlib import Path

from wandb.proto import wandb_internal_pb2

_BLOCK, _HEADER = 32768, struct.Struct("<IHB")


def read_records(folder: Path) -> list:
    """All records of a run's folder, in order."""
    (path,) = folder.glob("*.wandb")
    content, position, part, records = path.read_bytes(), 7, b"", []
    assert content[:4] == b":W&B"
    while position + _HEADER.size <= len(content):
        if _BLOCK - position % _BLOCK < _HEADER.size:  # no header fits: the next block
            position += _BLOCK - position % _BLOCK
            continue
        _, length, kind = _HEADER.unpack_from(content, position)
        position += _HEADER.size
        part += content[position : position + length]
        position += length
        if kind in (1, 4):  # a whole record, or its last part
            records.append(wandb_internal_pb2.Record.FromString(part))
            part = b""
    return records


def read_run(folder: Path) -> dict:
    """A run's id, settings, history, metric definitions and exit code."""
    records = read_records(folder)
    (run,) = (record.run for record in records if record.HasField("run"))
    return {
        "id": run.run_id,
        "project": run.project,
        "group": run.run_group,
        "tags": list(run.tags),
        "config": {item.key: json.loads(item.value_json) for item in run.config.update},
        "history": [
            {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            for record in records
            if record.HasField("history")
        ],
        "step_metrics": {
            record.metric.name or record.metric.glob_name: record.metric.step_metric
            for record in records
            if record.HasField("metric")
        },
        "exit_code": next(record.exit.exit_code for record in records if record.HasField("exit")),
    }
