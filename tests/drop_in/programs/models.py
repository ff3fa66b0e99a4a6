"""Models of all kinds, in the plain loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.ao.quantization as quantization
from harness import Library, Record, program
from nets import CLASSES, FEATURES, ROWS, batch, mlp, words
from plain_loop import train
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


class Autoencoder(nn.Module):
    """Its decoder is its encoder, transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(FEATURES, CLASSES)
        self.again = nn.Linear(FEATURES, CLASSES)
        self.again.weight = self.encoder.weight
        self.bias = nn.Parameter(torch.zeros(FEATURES))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.encoder(inputs).tanh() @ self.encoder.weight + self.bias
        out: Tensor = self.again(hidden)
        return out


@program()
def tied_weights(lib: Library, record: Record) -> None:
    train(lib, record, Autoencoder())


class LowRank(nn.Module):
    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.base(inputs) + inputs @ self.down.t() @ self.up.t()
        return out


@program()
def low_rank_adapters_on_a_frozen_base(lib: Library, record: Record) -> None:
    module = mlp().requires_grad_(False)
    module[0], module[2] = LowRank(module[0], 2), LowRank(module[2], 2)
    train(lib, record, module)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()
        self.register_buffer("rows_seen", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        self.rows_seen += inputs.sum()
        out: Tensor = self.layers(inputs)
        return out


@program("torch DDP")
def an_ignored_buffer(lib: Library, record: Record) -> None:
    module = Counting()
    module._ddp_params_and_buffers_to_ignore = ["rows_seen"]
    train(lib, record, module)


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.recurrent = nn.LSTM(4, 5, num_layers=2, batch_first=True, bidirectional=True)
        self.out = nn.Linear(10, CLASSES)

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(
            self.embedding(words), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        states, _ = pad_packed_sequence(self.recurrent(packed)[0], batch_first=True)
        out: Tensor = self.out(states.mean(1))
        return out


@program(on_gpu=False)
def packed_sequences(lib: Library, record: Record) -> None:
    model = lib.DataParallel(Tagger().to(lib.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        words = lib.share(torch.randint(11, (ROWS, 7), generator=generator))
        # The mean over padded places divides by the longest: so let each rank have one of these.
        lengths = lib.share(torch.arange(ROWS) // 6 * 2 + 5)
        loss = functional.cross_entropy(model(words, lengths), lib.share(torch.arange(ROWS) % 3))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        record(model, optimizer, loss)


@dataclass
class Output:
    logits: Tensor
    hidden: list[Tensor]
    extra: dict[str, Any]


class WithDataclass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, 5), nn.Linear(5, CLASSES)
        self.auxiliary = nn.Linear(5, 1)

    def forward(self, inputs: Tensor) -> Output:
        hidden = self.first(inputs).tanh()
        extra = {"auxiliary": (self.auxiliary(hidden), "a word"), "count": len(inputs)}
        return Output(self.second(hidden), [hidden], extra)


@program()
def a_dataclass_as_output(lib: Library, record: Record) -> None:
    model = lib.DataParallel(WithDataclass().to(lib.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(3):
        inputs, targets = batch(lib, step)
        output = model(inputs=inputs)
        loss = functional.cross_entropy(output.logits, targets)
        loss = loss + output.extra["auxiliary"][0].square().mean() + output.hidden[0].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        record(model, optimizer, loss)


class Scored(NamedTuple):
    scores: Tensor
    parts: dict[str, list[Tensor]]


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"a": nn.Linear(FEATURES, 3), "b": nn.Linear(FEATURES, 3)})

    def forward(self, given: dict[str, Any]) -> tuple[Scored, None, dict[str, Any]]:
        parts = {name: [layer(given["rows"][0])] for name, layer in self.layers.items()}
        scores = parts["a"][0] + parts["b"][0].tanh()
        return Scored(scores, parts), None, {"rows": given["rows"]}


@program()
def nested_inputs_and_outputs(lib: Library, record: Record) -> None:
    model = lib.DataParallel(Nested().to(lib.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(3):
        inputs, targets = batch(lib, step)
        scored, nothing, echoed = model({"rows": [inputs]})
        loss = functional.cross_entropy(scored.scores, targets) + scored.parts["b"][0].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        record(model, optimizer, loss, nothing=nothing, echoed=echoed["rows"][0] is inputs)


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.layers(inputs)
        if labels is None:
            return {"logits": logits}
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


@program()
def the_loss_computed_in_the_model(lib: Library, record: Record) -> None:
    model = lib.DataParallel(WithLoss().to(lib.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(3):
        inputs, targets = batch(lib, step)
        outputs = model(inputs, labels=targets)
        outputs["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model.eval()
            logits = model(inputs)["logits"]
            model.train()
        record(model, optimizer, outputs["loss"], local={"logits": logits})


@program()
def weight_norm(lib: Library, record: Record) -> None:
    module = mlp()
    parametrizations.weight_norm(module[0])
    parametrizations.weight_norm(module[2])
    train(lib, record, module)


@program("torch DDP")
def spectral_norm(lib: Library, record: Record) -> None:
    # Its power iteration changes buffers in forward.
    module = mlp()
    parametrizations.spectral_norm(module[0])
    train(lib, record, module)


class Bag(nn.Module):
    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 4, sparse=sparse)
        self.out = nn.Linear(4, CLASSES)

    def forward(self, words: Tensor) -> Tensor:
        out: Tensor = self.out(self.table(words).mean(1))
        return out


@program(on_gpu=False)
def sparse_embeddings(lib: Library, record: Record) -> None:
    model = lib.DataParallel(Bag(sparse=True).to(lib.device))
    table, rest = list(model.module.table.parameters()), list(model.module.out.parameters())
    sparse, dense = torch.optim.SparseAdam(table, lr=0.1), torch.optim.AdamW(rest, lr=0.01)
    for step in range(3):
        inputs, targets = words(lib, step)
        loss = functional.cross_entropy(model(inputs), targets)
        sparse.zero_grad()
        dense.zero_grad()
        loss.backward()
        sparse.step()
        dense.step()
        record(model, {"sparse": sparse, "dense": dense}, loss)


class Fourier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(4, dtype=torch.complex128))
        self.out = nn.Linear(FEATURES, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(inputs) * self.filter
        out: Tensor = self.out(torch.fft.irfft(spectrum, n=FEATURES))
        return out


@program(on_gpu=False)
def complex_parameters(lib: Library, record: Record) -> None:
    train(lib, record, Fourier(), optimizer_class=torch.optim.Adam)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.inwards = nn.Linear(1, 8)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.places = nn.Parameter(torch.randn(FEATURES, 8))
        self.out = nn.Linear(8, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.out(self.encoder(self.inwards(inputs[..., None]) + self.places).mean(1))
        return out


@program()
def a_transformer(lib: Library, record: Record) -> None:
    train(lib, record, Attention())


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 4, 2), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, CLASSES, (1, 2))
        )

    def forward(self, inputs: Tensor) -> Tensor:
        pictures = inputs.view(-1, 1, 2, 3).contiguous(memory_format=torch.channels_last)
        out: Tensor = self.layers(pictures).flatten(1)
        return out


@program(on_gpu=False)
def channels_last_convolutions(lib: Library, record: Record) -> None:
    train(lib, record, Images().to(memory_format=torch.channels_last))


class OddShapes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.list = nn.ParameterList([torch.randn(FEATURES, CLASSES) for _ in range(2)])
        self.turned = nn.Parameter(torch.randn(CLASSES, FEATURES).t())

    def forward(self, inputs: Tensor) -> Tensor:
        weight = self.list[0] + self.list[1].sin() + self.turned
        return inputs @ weight * self.scale + self.nothing.sum()


@program()
def empty_scalar_and_transposed_parameters(lib: Library, record: Record) -> None:
    train(lib, record, OddShapes())


@program("torch DDP")
def dropout_with_a_seed_for_each_rank(lib: Library, record: Record) -> None:
    torch.manual_seed(1234 + lib.rank)
    module = nn.Sequential(nn.Linear(FEATURES, 16), nn.Dropout(0.5), nn.Linear(16, CLASSES))
    train(lib, record, module)


@program()
def a_lazy_layer_made_real_before_wrapping(lib: Library, record: Record) -> None:
    module = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(CLASSES))
    with torch.no_grad():
        module(torch.ones(1, FEATURES))
    train(lib, record, module)


class Many(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(20))
        self.out = nn.Linear(FEATURES, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = inputs + layer(inputs).tanh()
        out: Tensor = self.out(inputs)
        return out


@program()
def many_small_buckets(lib: Library, record: Record) -> None:
    train(lib, record, Many(), bucket_cap_mb=0.0005)


@program()
def a_static_graph(lib: Library, record: Record) -> None:
    train(lib, record, Many(), static_graph=True)


class FromAList(nn.Module):
    """Made for what it is given, and called with keywords only."""

    def __init__(self, *, width: int) -> None:
        super().__init__()
        self.width = width
        self.layers = mlp()

    def forward(self, *, rows: Tensor, scale: float = 1.0) -> Tensor:
        out: Tensor = self.layers(rows[:, : self.width]) * scale
        return out

    def predict(self, rows: Tensor) -> Tensor:
        with torch.no_grad():
            return self.forward(rows=rows).argmax(-1)


@program()
def keywords_and_methods_of_the_module(lib: Library, record: Record) -> None:
    model = lib.DataParallel(FromAList(width=FEATURES).to(lib.device))
    optimizer = torch.optim.AdamW(model.module.parameters(), lr=0.01)
    for step in range(3):
        inputs, targets = batch(lib, step)
        loss = functional.cross_entropy(model(rows=inputs, scale=2.0), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        predicted = model.module.predict(inputs)
        record(model, optimizer, loss, local={"predicted": predicted}, width=model.module.width)


class OddTypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()
        self.order = nn.Parameter(torch.randperm(FEATURES), requires_grad=False)
        self.register_buffer("mask", torch.rand(FEATURES) > 0.3)
        self.register_buffer("levels", torch.randint(255, (5,), dtype=torch.uint8))
        self.register_buffer("turn", torch.randn(2, dtype=torch.complex128), persistent=False)
        self.register_buffer("places", torch.arange(4).expand(1, -1))
        self.register_buffer("nothing", None)
        self.register_buffer("empty", torch.zeros(0))

    def forward(self, inputs: Tensor) -> Tensor:
        chosen = inputs[:, self.order] * self.mask
        out: Tensor = self.layers(chosen) * self.turn.abs().sum() + self.levels.double().mean()
        return out


@program(on_gpu=False)
def parameters_and_buffers_of_odd_types(lib: Library, record: Record) -> None:
    train(lib, record, OddTypes())


@program("torch DDP", refused="by a first forward.* as observers of quantization do", on_gpu=False)
def quantization_aware_training(lib: Library, record: Record) -> None:
    """Observers of channels give their buffers a shape in the first forward."""
    observer = quantization.MovingAveragePerChannelMinMaxObserver
    fake = quantization.FakeQuantize(observer, dtype=torch.qint8, quant_min=-128, quant_max=127)
    model = lib.DataParallel(nn.Sequential(nn.Linear(6, 4, dtype=torch.float32), fake))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        loss = model(batch(lib, step)[0].float()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        record(None, optimizer, loss, bias=model.module[0].bias)
