"""Column layout of LeRobot v3.0 files, for writing: data, tasks and the episode index.

Names, order, types and metadata are those of files that LeRobot 0.6 writes, so that it opens ours: fixed-size lists
for vectors, plain columns for features of shape (1,), `{bytes, path}` for pictures, and the `huggingface` and `pandas`
entries its readers look at.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from lightning_embodied.data.metadata import BOOKKEEPING
from lightning_embodied.features import STATISTICS, Feature

_STATISTICS_ORDER = ("min", "max", "mean", "std", "count", *(name for name in STATISTICS if name.startswith("q")))

BOOKKEEPING_FEATURES = {key: Feature("float32" if key == "timestamp" else "int64", (1,), None) for key in BOOKKEEPING}


def _element(dtype: str) -> pa.DataType:
    return pa.string() if dtype == "string" else pa.from_numpy_dtype(np.dtype(dtype))


def _field(key: str, feature: Feature) -> pa.Field:
    if feature.dtype == "image":
        return pa.field(key, pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
    if feature.shape == (1,):
        return pa.field(key, _element(feature.dtype))
    if len(feature.shape) == 1:
        # LeRobot's files call the items "element"; pyarrow does so itself when it writes parquet
        return pa.field(key, pa.list_(_element(feature.dtype), feature.shape[0]))
    kind = _element(feature.dtype)
    for _ in feature.shape:
        kind = pa.list_(kind)
    return pa.field(key, kind)


def _described(feature: Feature) -> dict[str, Any]:
    """A feature in the words of the `datasets` library."""
    if feature.dtype == "image":
        return {"_type": "Image"}
    value = {"dtype": feature.dtype, "_type": "Value"}
    if feature.shape == (1,):
        return value
    if len(feature.shape) == 1:
        return {"feature": value, "length": feature.shape[0], "_type": "List"}
    return {"shape": list(feature.shape), "dtype": feature.dtype, "_type": f"Array{len(feature.shape)}D"}


def data_schema(features: Mapping[str, Feature]) -> pa.Schema:
    """Schema of a data file.

    Args:
        features: All features, bookkeeping columns included; videos have no column.
    """
    stored = {key: feature for key, feature in features.items() if feature.dtype != "video"}
    info = {"info": {"features": {key: _described(feature) for key, feature in stored.items()}}}
    return pa.schema([_field(key, f) for key, f in stored.items()], metadata={"huggingface": json.dumps(info)})


def column_array(values: Sequence[Any], field: pa.Field, feature: Feature) -> pa.Array:
    """One episode of one column.

    Args:
        values: One value a frame: arrays of the feature's shape, strings, or PNG bytes for pictures.
        field: The column of `data_schema`.
        feature: The feature.
    """
    if feature.dtype == "image":
        return pa.array([{"bytes": value, "path": None} for value in values], type=field.type)
    if feature.dtype == "string":
        return pa.array([str(value) for value in values], type=field.type)
    stacked = np.stack(values)
    if feature.shape == (1,):
        return pa.array(stacked.reshape(-1), type=field.type)
    if len(feature.shape) == 1:
        flat = pa.array(stacked.reshape(-1), type=field.type.value_type)
        return pa.FixedSizeListArray.from_arrays(flat, type=field.type)
    return pa.array(stacked.tolist(), type=field.type)


def tasks_table(tasks: Sequence[str]) -> pa.Table:
    """The task table; `task` is marked as the pandas index, which is how LeRobot looks tasks up."""
    columns = [
        {"name": name, "field_name": name, "pandas_type": kind, "numpy_type": numpy_type, "metadata": None}
        for name, kind, numpy_type in (("task_index", "int64", "int64"), ("task", "unicode", "object"))
    ]
    label = {"name": None, "field_name": None, "pandas_type": "unicode", "numpy_type": "object"}
    pandas = {
        "index_columns": ["task"],
        "column_indexes": [{**label, "metadata": {"encoding": "UTF-8"}}],
        "columns": columns,
        "attributes": {},
        "creator": {"library": "pyarrow", "version": pa.__version__},
        "pandas_version": "2.3.3",
    }
    schema = pa.schema([("task_index", pa.int64()), ("task", pa.string())], metadata={"pandas": json.dumps(pandas)})
    return pa.table([pa.array(range(len(tasks)), pa.int64()), pa.array(list(tasks), pa.string())], schema=schema)


def episode_schema(features: Mapping[str, Feature]) -> pa.Schema:
    """Schema of the episode index.

    Args:
        features: All features, bookkeeping columns included.
    """
    fields: list[tuple[str, pa.DataType]] = [
        ("episode_index", pa.int64()),
        ("tasks", pa.list_(pa.string())),
        ("length", pa.int64()),
        ("data/chunk_index", pa.int64()),
        ("data/file_index", pa.int64()),
        ("dataset_from_index", pa.int64()),
        ("dataset_to_index", pa.int64()),
    ]
    for key, feature in features.items():
        if feature.dtype == "video":
            fields += [(f"videos/{key}/chunk_index", pa.int64()), (f"videos/{key}/file_index", pa.int64())]
            fields += [(f"videos/{key}/from_timestamp", pa.float64()), (f"videos/{key}/to_timestamp", pa.float64())]
    for key, feature in features.items():
        if feature.dtype == "string":
            continue
        kind: pa.DataType = pa.float64()
        for _ in range(3 if feature.is_visual else len(feature.shape)):
            kind = pa.list_(kind)
        for name in _STATISTICS_ORDER:
            fields.append((f"stats/{key}/{name}", pa.list_(pa.int64()) if name == "count" else kind))
    fields += [("meta/episodes/chunk_index", pa.int64()), ("meta/episodes/file_index", pa.int64())]
    return pa.schema(fields)
