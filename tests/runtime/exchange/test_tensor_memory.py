"""The form of a tensor that another rank is told."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from adaptra.errors import ControlError
from adaptra.runtime.control_store.schema import decode, encode
from adaptra.runtime.exchange.tensor_memory import TensorForm


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """A tensor of up to four dimensions, permuted, with gaps, begun late, or repeated."""
    shape = draw(st.lists(st.integers(0, 3), max_size=4))
    whole = torch.randn([size + draw(st.integers(0, 2)) for size in shape])
    for dimension, size in enumerate(shape):
        whole = whole.narrow(dimension, whole.shape[dimension] - size, size)
    turned = whole.permute(draw(st.permutations(range(len(shape)))))
    repeated = [size if size != 1 else draw(st.integers(1, 3)) for size in turned.shape]
    return turned.expand(repeated)


def told(form: TensorForm) -> TensorForm:
    """What another rank reads of a form."""
    fields = decode(encode({"form": form.told()}).encode(), "test")
    return TensorForm.read(fields, "form", fields.raw("form"))


@given(tensors())
@example(torch.randn(1).expand(2))
@example(torch.randn(3)[::2][1:])
def test_a_tensor_comes_back_in_its_form_or_in_a_dense_one(tensor: Tensor) -> None:
    form, dense = TensorForm.of(tensor), TensorForm.dense(tensor)
    for one in (form, dense):
        assert told(one) == one
        body = one.pack(tensor)
        assert len(body) == one.nbytes
        assert torch.equal(one.unpack(body), tensor)
    assert form.unpack(form.pack(tensor)).stride() == tensor.stride()
    flat = dense.unpack(dense.pack(tensor).clone())
    assert flat.numel() * flat.element_size() == flat.untyped_storage().nbytes(), "without gaps and repetition"
    assert tensor.is_contiguous() <= flat.is_contiguous()
    assert form.nbytes <= dense.nbytes


def test_a_dense_form_keeps_the_order_of_dimensions_and_needs_no_copy() -> None:
    channels = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    form = TensorForm.dense(channels[:, :, ::2])
    body = form.pack(channels[:, :, ::2])
    made = form.unpack(body)
    assert made.is_contiguous(memory_format=torch.channels_last)
    assert made.data_ptr() == body.data_ptr()


@pytest.mark.parametrize("item", [None, [], ["cpu", "float32", [1]], ["cpu", "float32", [True], [1]], ["cpu", "int", [1], [1]]])
def test_what_is_no_form_is_refused(item: object) -> None:
    fields = decode(encode({"form": item}).encode(), "state of rank 1")
    with pytest.raises(
        ControlError, match="state of rank 1: field 'form': expected a device, a dtype, a shape and its strides"
    ):
        TensorForm.read(fields, "form", fields.raw("form"))
