"""GGUF model files: reading, block formats, dequantisation.

Writing is in `m40llm.gguf.quantize`, apart because it imports the slow-starting gguf package.
"""

from m40llm.gguf.dequant import dequantize
from m40llm.gguf.errors import GGUFError, UnsupportedTypeError
from m40llm.gguf.metadata import Metadata
from m40llm.gguf.parse import TensorInfo
from m40llm.gguf.reader import GGUFFile
from m40llm.gguf.types import BLOCKS, BlockFormat, TensorType, ValueType

__all__ = [
    "BLOCKS",
    "BlockFormat",
    "GGUFError",
    "GGUFFile",
    "Metadata",
    "TensorInfo",
    "TensorType",
    "UnsupportedTypeError",
    "ValueType",
    "dequantize",
]
