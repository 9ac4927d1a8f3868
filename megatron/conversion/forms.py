"""The forms that a model is converted between, and what else than a folder each is read and written by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from megatron.conversion.hugging_face import read_hugging_face, write_hugging_face
from megatron.conversion.megatron_lm.reader import read_megatron
from megatron.conversion.megatron_lm.writer import write_megatron
from megatron.conversion.native import read_native, write_native
from megatron.conversion.portable import PortableModel


@dataclass(frozen=True, kw_only=True)
class Form:
    """A form of a model on disk.

    Attributes:
        read: makes a model of a folder and keywords.
        write: puts a model into a folder, by keywords.
        reading, writing: by an option of the converter the keyword for it.
    """

    name: str
    read: Callable[..., PortableModel]
    write: Callable[..., object]
    reading: Mapping[str, str] = field(default_factory=dict)
    writing: Mapping[str, str] = field(default_factory=dict)


_FORMS = (
    Form(name="hf", read=read_hugging_face, write=write_hugging_face, writing={"hf_family": "family_name"}),
    Form(name="native", read=read_native, write=write_native, reading={"ckpt_step": "step"}),
    Form(
        name="megatron",
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
