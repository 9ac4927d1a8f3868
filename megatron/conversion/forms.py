"""The forms that a model is converted between, and what else than a folder each is read and written by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megatron.checkpointing import storage
from megatron.checkpointing.load import MARKS_OF_MEGATRON_LM
from megatron.conversion.hugging_face import CONFIG, read_hugging_face, write_hugging_face
from megatron.conversion.megatron_lm.reader import read_megatron
from megatron.conversion.megatron_lm.writer import write_megatron
from megatron.conversion.native import read_native, write_native
from megatron.conversion.portable import ConversionError, PortableModel


@dataclass(frozen=True, kw_only=True)
class Form:
    """A form of a model on disk.

    Attributes:
        means: what a folder of it is, in words.
        marks: patterns of paths in a folder, one of which each folder of it has.
        read: makes a model of a folder and keywords.
        write: puts a model into a folder, by keywords.
        reading, writing: by an option of the converter the keyword for it.
    """

    name: str
    means: str
    marks: tuple[str, ...]
    read: Callable[..., PortableModel]
    write: Callable[..., object]
    reading: Mapping[str, str] = field(default_factory=dict)
    writing: Mapping[str, str] = field(default_factory=dict)

    def has(self, folder: Path) -> bool:
        """Whether a folder looks like one of this form."""
        return any(any(folder.glob(mark)) for mark in self.marks)


_FORMS = (
    Form(
        name="hf",
        means="a model of Hugging Face",
        marks=(CONFIG,),
        read=read_hugging_face,
        write=write_hugging_face,
        writing={"hf_family": "family_name"},
    ),
    Form(
        name="native",
        means="a checkpoint of this program",
        marks=(storage.INDEX_FILE, f"iter_*/{storage.INDEX_FILE}"),
        read=read_native,
        write=write_native,
        reading={"ckpt_step": "step"},
    ),
    Form(
        name="megatron",
        means="a checkpoint of Megatron-LM",
        marks=MARKS_OF_MEGATRON_LM,
        read=read_megatron,
        write=write_megatron,
        reading={"ckpt_step": "step", "true_vocab_size": "true_vocab_size", "weights_only": "weights_only"},
        writing={
            "target_tensor_parallel_size": "tensor",
            "target_pipeline_parallel_size": "pipeline",
            "target_virtual_pipeline_parallel_size": "virtual",
            "target_transformer_impl": "transformer_impl",
            "target_make_vocab_size_divisible_by": "make_vocab_size_divisible_by",
        },
    ),
)
FORMS: Mapping[str, Form] = {form.name: form for form in _FORMS}


def refuse_other_form(form: Form, folder: Path) -> None:
    """Refuse a folder that does not look like one of a form, and looks like one of another.

    Raises:
        ConversionError: says which.
    """
    if form.has(folder):
        return
    for other in _FORMS:
        if other.has(folder):
            raise ConversionError(
                f"{folder} is not {form.means} (--from {form.name}): it looks like {other.means}, --from {other.name}"
            )
