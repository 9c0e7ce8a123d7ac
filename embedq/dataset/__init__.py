"""What a person does with a finished dataset directory: read, inspect, search, export, compact it."""

from embedq_schemas.quantize import VectorType
from embedq_schemas.vector_batch import VectorBatch

from embedq.dataset.pooling import PooledReader, pooled
from embedq.dataset.reader import DatasetReader, VectorFacts, open_dataset

__all__ = ["DatasetReader", "PooledReader", "VectorBatch", "VectorFacts", "VectorType", "open_dataset", "pooled"]
