"""Small versions of the architectures that people train, made from configurations: no weights are fetched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name all of torch uses
import transformers
from models import GPT, Batch, Example, class_loss, generator, token_loss, tokens
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCABULARY, LENGTH = 64, 12


def language_model(model: type[Any], config: type[Any], **settings: Any) -> Callable[[], nn.Module]:
    """One of transformers' models with four small layers."""
    return lambda: model(config(vocab_size=VOCABULARY, use_cache=False, **settings))


TEN_CLASSES: dict[str, Any] = {"num_labels": 10}
"""What configurations take, though their signatures do not say so."""

LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
"""What Llama and those that descend from it call their sizes; two key-value heads for four of queries."""


class LowRank(nn.Module):
    """A frozen linear layer and two thin trainable ones beside it (LoRA)."""

    def __init__(self, frozen: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.frozen = frozen
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.up(self.down(x))


class Adapted(nn.Module):
    """A frozen GPT with low-rank adapters in its third and seventh block: whole stages have nothing to train."""

    def __init__(self) -> None:
        super().__init__()
        self.model = GPT(blocks=8)
        self.model.requires_grad_(False)
        for index in (2, 6):
            block: Any = self.model.blocks[index]
            block.qkv = LowRank(block.qkv)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


class Bottleneck(nn.Module):
    """ResNet-50's block: 1×1, 3×3 and 1×1 convolutions, four times as many channels at its end."""

    def __init__(self, given: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(given, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride > 1 or given != 4 * width:
            self.downsample = nn.Sequential(nn.Conv2d(given, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        short = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        x = self.bn3(self.conv3(x))
        x += short
        return self.relu(x)


class ResNet50(nn.Module):
    """ResNet-50 with a sixteenth of its channels."""

    def __init__(self, width: int = 4, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        given = width
        for index, (depth, stride) in enumerate(((3, 1), (4, 2), (6, 2), (3, 2)), 1):
            blocks: list[nn.Module] = []
            for number in range(depth):
                blocks.append(Bottleneck(given, width, 1 if number else stride))
                given = 4 * width
            setattr(self, f"layer{index}", nn.Sequential(*blocks))
            width *= 2
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(given, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for number in (1, 2, 3, 4):
            x = self.get_submodule(f"layer{number}")(x)
        return self.fc(torch.flatten(self.avgpool(x), 1))


class UNet(nn.Module):
    """Three levels down and up again; each level's skip reaches over all that lies below it, so over several stages."""

    def __init__(self, width: int = 6, classes: int = 3) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width]
        self.down = nn.ModuleList(self._pair(given, made) for given, made in zip([3, *widths], widths, strict=False))
        self.bottom = self._pair(widths[-1], 8 * width)
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * one, one, 2, 2) for one in reversed(widths))
        self.merge = nn.ModuleList(self._pair(2 * one, one) for one in reversed(widths))
        self.head = nn.Conv2d(width, classes, 1)

    @staticmethod
    def _pair(given: int, made: int) -> nn.Module:
        first, second = nn.Conv2d(given, made, 3, 1, 1), nn.Conv2d(made, made, 3, 1, 1)
        return nn.Sequential(first, nn.BatchNorm2d(made), nn.ReLU(inplace=True), second, nn.ReLU(inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.bottom(x)
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([skips.pop(), up(x)], 1))
        return self.head(x)


class LSTM(nn.Module):
    """A language model of four recurrent layers with dropout in between; its states start from zero for every row."""

    def __init__(self, width: int = 24, layers: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.layers = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(layers))
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = self.drop(layer(x)[0])
        return self.head(x)


class Checkpointed(GPT):
    """A GPT that keeps each block's input only and computes the rest again in the backward pass.

    ``reentrant`` chooses between the two forms of checkpointing that torch has.
    """

    def __init__(self, blocks: int = 4, dropout: float = 0.0, reentrant: bool = False) -> None:
        super().__init__(blocks=blocks, dropout=dropout)
        self.reentrant = reentrant

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x: Any = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(self.norm(x))


def sequential() -> nn.Module:
    """A plain chain of layers."""
    blocks = [nn.Sequential(nn.Linear(48, 48), nn.LayerNorm(48), nn.GELU()) for _ in range(6)]
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 48), *blocks, nn.Linear(48, 10))


def labelled(rows: int, seed: int) -> Batch:
    """Tokens that are their own labels; the models shift them."""
    drawn = torch.randint(0, VOCABULARY, (rows, LENGTH), generator=generator(seed))
    return (drawn,), {"labels": drawn}, None


def translated(rows: int, seed: int) -> Batch:
    """Tokens to read, padded at different lengths, and others to write."""
    source = generator(seed)
    read, written = torch.randint(1, VOCABULARY, (2, rows, LENGTH), generator=source)
    mask = (torch.arange(LENGTH) < torch.randint(6, LENGTH + 1, (rows, 1), generator=source)).long()
    return (read,), {"attention_mask": mask, "labels": written}, None


def masked(rows: int, seed: int) -> Batch:
    """Tokens of which some, as many in each row, are to be found out."""
    drawn = torch.randint(1, VOCABULARY, (rows, LENGTH), generator=generator(seed))
    hidden = torch.arange(LENGTH) % 4 == 1
    return (drawn.masked_fill(hidden, 0),), {"labels": drawn.masked_fill(~hidden, -100)}, None


def pictures(size: int) -> Callable[[int, int], Batch]:
    """Images and the class of each."""

    def batch(rows: int, seed: int) -> Batch:
        source = generator(seed)
        return (torch.randn(rows, 3, size, size, generator=source),), {}, torch.randint(0, 10, (rows,), generator=source)

    return batch


def labelled_pictures(rows: int, seed: int) -> Batch:
    """Images and their classes, for a model that computes its loss."""
    args, _, labels = pictures(16)(rows, seed)
    return args, {"labels": labels}, None


def segmented(rows: int, seed: int) -> Batch:
    """Images and the class of each pixel."""
    source = generator(seed)
    return (torch.randn(rows, 3, 16, 16, generator=source),), {}, torch.randint(0, 3, (rows, 16, 16), generator=source)


TRANSFORMERS = (
    Example(
        "GPT-2",
        language_model(
            transformers.GPT2LMHeadModel,
            transformers.GPT2Config,
            n_positions=32,
            n_embd=32,
            n_layer=4,
            n_head=4,
            bos_token_id=0,
            eos_token_id=0,
        ),
        labelled,
        None,
    ),
    Example("Llama", language_model(transformers.LlamaForCausalLM, transformers.LlamaConfig, **LLAMA), labelled, None),
    Example("Qwen2", language_model(transformers.Qwen2ForCausalLM, transformers.Qwen2Config, **LLAMA), labelled, None),
    Example(
        "Mixtral",
        language_model(
            transformers.MixtralForCausalLM,
            transformers.MixtralConfig,
            **LLAMA,
            num_local_experts=4,
            num_experts_per_tok=2,
            output_router_logits=True,
        ),
        labelled,
        None,
    ),
    Example(
        "T5",
        language_model(
            transformers.T5ForConditionalGeneration,
            transformers.T5Config,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
        ),
        translated,
        None,
    ),
    Example(
        "BERT",
        language_model(
            transformers.BertForMaskedLM,
            transformers.BertConfig,
            hidden_size=32,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=48,
            max_position_embeddings=32,
        ),
        masked,
        None,
    ),
    Example(
        "ViT",
        lambda: transformers.ViTForImageClassification(
            transformers.ViTConfig(
                **TEN_CLASSES,
                hidden_size=32,
                num_hidden_layers=4,
                num_attention_heads=4,
                intermediate_size=48,
                image_size=16,
                patch_size=4,
            )
        ),
        labelled_pictures,
        None,
    ),
)

WRITTEN = (
    Example("LoRA", Adapted, tokens, token_loss),
    Example("ResNet-50", ResNet50, pictures(32), class_loss),
    Example("U-Net", UNet, segmented, class_loss),
    Example("LSTM", LSTM, tokens, token_loss),
    Example("GPT, checkpointed", Checkpointed, tokens, token_loss),
    Example("nn.Sequential", sequential, pictures(16), class_loss),
)

ARCHITECTURES = {one.name: one for one in (*TRANSFORMERS, *WRITTEN)}
