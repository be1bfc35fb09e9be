"""Makes of an image what a model's vision encoder takes, by transformers' processor for it."""

import hashlib
import inspect
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import structlog
from PIL import Image
from safetensors.numpy import save
from transformers import AutoConfig, AutoImageProcessor, PreTrainedTokenizerBase
from transformers.models.auto import processing_auto

from octavo.common import rpc
from octavo.common.models.errors import first_line
from octavo.common.models.image_families import PROCESSOR_FILES
from octavo.common.models.json_files import read_json
from octavo.router.images.llama4 import Llama4ImageProcessor
from octavo.router.images.pixtral import PixtralProcessor

log = structlog.get_logger(__name__)

COUNTS = "batch_num_images"
"""transformers' name of the number of a prompt's images."""
PARTS = ["image_processor", "tokenizer"]
"""The parts of a processor that images need; a video processor would need PyTorch."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class ProcessedImage:
    """An image as a vision encoder takes it.

    Attributes:
        tensors: A safetensors file of its tensors.
        digest: The SHA-256 of this file.
        text: The text that stands for it in a prompt.
        num_tokens: Number of tokens in this text whose embeddings it replaces.
    """

    tensors: bytes
    digest: bytes
    text: str
    num_tokens: int


class ImageProcessor:
    """A model's processor of images.

    Args:
        processor: The processor of transformers.
        image_token_id: The token whose embeddings images replace.

    Attributes:
        placeholder: The text by which the chat template marks an image's place.
        image_token_id: See the arguments.
        transformers: The processor of transformers.
        id: Identifies it: others may process images in another way.
        counts: Whether the image of a prompt with one image is processed in another way than those
            of a prompt with several, as LLaVA-OneVision's are, which are cut into no tiles.
    """

    def __init__(self, processor: Any, image_token_id: int) -> None:  # noqa: ANN401
        self.transformers = processor
        self.id = secrets.token_hex(8)
        self.placeholder: str = processor.image_token
        self.image_token_id = image_token_id
        self.counts = COUNTS in processor.image_processor.model_input_names
        self._image_token: str = processor.tokenizer.convert_ids_to_tokens(image_token_id)

    def process(self, field: str, image: Image.Image, *, alone: bool = True) -> ProcessedImage:
        """Process an image.

        Args:
            field: The image's place in the request.
            image: The image, in RGB.
            alone: Whether the prompt has no other.

        Raises:
            rpc.RpcError: INVALID_ARGUMENT if the model's processor refuses it.
        """
        processor = self.transformers
        options = {**getattr(processor, "images_kwargs", {}), "return_tensors": "np"}
        try:
            images = [[image, image]] if self.counts and not alone else [image]
            inputs, (text, *_) = processor._process_images(images, **options)  # noqa: SLF001 - no public name
        except Exception as error:  # processors raise many types
            why = f"{field} cannot be processed for this model: {first_line(error)}"
            raise rpc.invalid(field, why) from error
        unused = set(processor.unused_input_names)
        arrays = {name: _array(name, value) for name, value in inputs.items() if name not in unused}
        if self.counts:  # of a second image there is only the number
            arrays = {name: array[:1] for name, array in arrays.items()}
        tensors = save(arrays)
        digest, count = hashlib.sha256(tensors).digest(), text.count(self._image_token)
        return ProcessedImage(tensors, digest, text, count)


def _array(name: str, value: object) -> np.ndarray:
    array = np.ascontiguousarray(value)
    return array.astype(np.bool_) if name.endswith("_mask") else array


def load_processor(directory: Path, tokenizer: PreTrainedTokenizerBase) -> ImageProcessor | None:
    """Load the processor of a directory whose model reads images.

    Without usable files of it, a warning is logged, and the model reads text alone.
    """
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
        processor = _load(config.model_type, directory, tokenizer)
    except Exception as error:  # noqa: BLE001 - transformers raises many types
        why = first_line(error)
        log.warning("no images: their processor cannot be loaded", path=str(directory), why=why)
        return None
    return ImageProcessor(processor, config.image_token_id)


def _load(kind: str, directory: Path, tokenizer: PreTrainedTokenizerBase) -> Any:  # noqa: ANN401
    """Create transformers' processor without the part for videos."""
    names: Mapping[str, str] = getattr(processing_auto, "PROCESSOR_MAPPING_NAMES")  # noqa: B009
    files = [
        read_json(directory / file) for file in PROCESSOR_FILES if (directory / file).is_file()
    ]
    named: list[str] = [file.get("processor_class", "") for file in files]
    name = next((name for name in named if name in names.values()), names[kind])
    own = name == PixtralProcessor.__name__
    whole: Any = PixtralProcessor if own else processing_auto.processor_class_from_name(name)
    module: Any = import_module(whole.__module__)
    if hasattr(module, "num2words"):  # a package that writes out numbers, of videos only
        module.num2words = module.num2words or str
    made = type(whole.__name__, (whole,), {"get_attributes": classmethod(lambda _: PARTS)})
    arguments = inspect.signature(whole.__init__).parameters
    saved: Mapping[str, Any] = whole.get_processor_dict(directory)[0]
    options = {
        name: value
        for name, value in saved.items()
        if name in arguments and name not in {*PARTS, "video_processor", "chat_template"}
    }
    if "video_processor" in arguments:
        options["video_processor"] = None
    if kind == "llama4":
        images = Llama4ImageProcessor.from_pretrained(directory)
    else:
        automatic: Any = AutoImageProcessor
        images = automatic.from_pretrained(directory, backend="pil")
    return made(image_processor=images, tokenizer=tokenizer, **options)
