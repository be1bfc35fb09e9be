"""Pixtral's layout of images; transformers' own processor cannot be imported without PyTorch."""

from collections.abc import Mapping
from typing import Any

from transformers.processing_utils import ProcessorMixin


class PixtralProcessor(ProcessorMixin):
    """Lays an image out in rows of tokens, each with a token at its end.

    Args:
        image_processor: The image processor.
        tokenizer: The tokenizer.
        patch_size: Pixels of a patch's side.
        spatial_merge_size: Patches of a token's side.
        image_token: The token that stands for a part of an image.
        image_break_token: The token at a row's end.
        image_end_token: The token at the image's end.
    """

    def __init__(
        self,
        image_processor: Any = None,  # noqa: ANN401 - as transformers calls it
        tokenizer: Any = None,  # noqa: ANN401
        *,
        patch_size: int = 16,
        spatial_merge_size: int = 1,
        image_token: str = "[IMG]",  # noqa: S107 - no password
        image_break_token: str = "[IMG_BREAK]",  # noqa: S107
        image_end_token: str = "[IMG_END]",  # noqa: S107
    ) -> None:
        super().__init__(image_processor, tokenizer)  # type: ignore[no-untyped-call]
        self._side = patch_size * spatial_merge_size
        self.image_token = image_token
        self.image_token_id = tokenizer.convert_tokens_to_ids(image_token)
        self._break, self._end = image_break_token, image_end_token

    def _process_images(self, images: Any, **options: Any) -> Any:  # noqa: ANN401
        return super()._process_images(images, **{**options, "patch_size": self._side})

    def replace_image_token(
        self,
        image_inputs: Mapping[str, Any],
        image_idx: int,
        **_: Any,  # noqa: ANN401
    ) -> str:
        """Return the text that stands for an image."""
        height, width = image_inputs["image_sizes"][image_idx]
        row = self.image_token * (width // self._side)
        return self._break.join([row] * (height // self._side)) + self._end
