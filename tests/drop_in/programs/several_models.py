"""Several models, several forwards, several backwards."""

import copy

import torch
from harness import Library, Record, program
from nets import CLASSES, FEATURES, ROWS, batch, mlp
from torch import Tensor, nn
from torch.nn import functional


def noise(lib: Library, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(500 + number)
    return lib.share(torch.randn(ROWS, 4, generator=generator))


def generator_and_discriminator(lib: Library) -> tuple[nn.Module, nn.Module]:
    generator = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, FEATURES))
    discriminator = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 1))
    return generator.to(lib.device), discriminator.to(lib.device)


@program()
def adversaries_that_freeze_in_turns(lib: Library, record: Record) -> None:
    generator, discriminator = map(lib.DataParallel, generator_and_discriminator(lib))
    of_generator = torch.optim.Adam(generator.parameters(), lr=0.01, betas=(0.5, 0.999))
    of_discriminator = torch.optim.Adam(discriminator.parameters(), lr=0.01, betas=(0.5, 0.999))
    for step in range(3):
        real, _ = batch(lib, step)
        for parameter in discriminator.parameters():
            parameter.requires_grad_(True)
        of_discriminator.zero_grad()
        fake = generator(noise(lib, step)).detach()
        loss = functional.softplus(-discriminator(real)).mean()
        loss = loss + functional.softplus(discriminator(fake)).mean()
        loss.backward()
        of_discriminator.step()

        for parameter in discriminator.parameters():
            parameter.requires_grad_(False)
        of_generator.zero_grad()
        deceit = functional.softplus(-discriminator(generator(noise(lib, step)))).mean()
        deceit.backward()
        of_generator.step()
        record(
            {"G": generator, "D": discriminator},
            {"G": of_generator, "D": of_discriminator},
            loss,
            averaged={"deceit": deceit},
        )


@program()
def adversaries_that_never_freeze(lib: Library, record: Record) -> None:
    # DCGAN's loop: two backwards into one discriminator, and the generator's through it.
    generator, discriminator = map(lib.DataParallel, generator_and_discriminator(lib))
    of_generator = torch.optim.SGD(generator.parameters(), lr=0.1)
    of_discriminator = torch.optim.SGD(discriminator.parameters(), lr=0.1)
    for step in range(3):
        real, _ = batch(lib, step)
        discriminator.zero_grad()
        on_real = functional.softplus(-discriminator(real)).mean()
        on_real.backward()
        fake = generator(noise(lib, step))
        on_fake = functional.softplus(discriminator(fake.detach())).mean()
        on_fake.backward()
        of_discriminator.step()
        generator.zero_grad()
        loss = functional.softplus(-discriminator(fake)).mean()
        loss.backward()
        of_generator.step()
        record(
            {"G": generator, "D": discriminator},
            {"G": of_generator, "D": of_discriminator},
            loss,
            averaged={"real": on_real, "fake": on_fake},
        )


@program()
def a_gradient_penalty(lib: Library, record: Record) -> None:
    # WGAN-GP: the gradient of the critic's inputs is a part of its loss.
    generator, critic = map(lib.DataParallel, generator_and_discriminator(lib))
    optimizer = torch.optim.Adam(critic.parameters(), lr=0.01)
    for step in range(3):
        real, _ = batch(lib, step)
        with torch.no_grad():
            fake = generator(noise(lib, step))
        between = (0.3 * real + 0.7 * fake).requires_grad_()
        scores = critic(between)
        (slope,) = torch.autograd.grad(scores.sum(), between, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        loss = critic(fake).mean() - critic(real).mean() + 10 * penalty
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        record({"G": generator, "D": critic}, optimizer, loss, averaged={"penalty": penalty})


@program()
def one_optimizer_for_two_models(lib: Library, record: Record) -> None:
    encoder = lib.DataParallel(nn.Linear(FEATURES, 4).to(lib.device))
    decoder = lib.DataParallel(nn.Linear(4, CLASSES).to(lib.device))
    optimizer = torch.optim.AdamW([*encoder.parameters(), *decoder.parameters()], lr=0.01)
    for step in range(3):
        inputs, targets = batch(lib, step)
        loss = functional.cross_entropy(decoder(encoder(inputs).tanh()), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        record({"encoder": encoder, "decoder": decoder}, optimizer, loss)


@program()
def a_frozen_teacher(lib: Library, record: Record) -> None:
    torch.manual_seed(77)
    teacher = mlp().to(lib.device).eval().requires_grad_(False)
    student = lib.DataParallel(mlp().to(lib.device))
    optimizer = torch.optim.AdamW(student.parameters(), lr=0.01)
    for step in range(3):
        inputs, _ = batch(lib, step)
        with torch.no_grad():
            wanted = teacher(inputs).log_softmax(-1)
        told = student(inputs).log_softmax(-1)
        loss = functional.kl_div(told, wanted, log_target=True, reduction="batchmean")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        record(student, optimizer, loss)


@program()
def a_target_that_follows(lib: Library, record: Record) -> None:
    # BYOL: two views forward through one model, and a target that follows its weights.
    online = lib.DataParallel(mlp().to(lib.device))
    target = copy.deepcopy(online.module).requires_grad_(False)
    optimizer = torch.optim.SGD(online.parameters(), lr=0.1)
    for step in range(3):
        inputs, _ = batch(lib, step)
        views = inputs, inputs.flip(1)
        told = [functional.normalize(online(view), dim=-1) for view in views]
        with torch.no_grad():
            wanted = [functional.normalize(target(view), dim=-1) for view in views]
        loss = -(told[0] * wanted[1]).sum(-1).mean() - (told[1] * wanted[0]).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for followed, follows in zip(
                online.module.parameters(), target.parameters(), strict=True
            ):
                follows.mul_(0.9).add_(followed, alpha=0.1)
        record({"online": online, "target": target}, optimizer, loss)


@program()
def forward_twice_before_backward(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(3):
        first, targets = batch(lib, 2 * step)
        second, _ = batch(lib, 2 * step + 1)
        near, far = model(first), model(second)
        loss = functional.cross_entropy(near, targets) + (near - far).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        record(model, optimizer, loss)


@program()
def a_backward_for_each_of_two_losses(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(3):
        inputs, targets = batch(lib, step)
        optimizer.zero_grad()
        first = functional.cross_entropy(model(inputs), targets)
        first.backward()
        second = model(inputs).square().mean()
        second.backward()
        optimizer.step()
        record(model, optimizer, first, averaged={"second": second})


_ONLY_THE_FIRST = "torch's DDP averages only the first backward after a forward"


class Annealed(nn.Module):
    """Computes with a buffer that each forward replaces."""

    temperature: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()
        self.register_buffer("temperature", torch.ones(1))

    def forward(self, inputs: Tensor) -> Tensor:
        self.temperature = self.temperature * 0.9
        out: Tensor = self.layers(inputs) * self.temperature
        return out


@program(without_ddp=_ONLY_THE_FIRST)
def a_buffer_replaced_by_each_of_two_forwards(lib: Library, record: Record) -> None:
    model = lib.DataParallel(Annealed().to(lib.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        first, targets = batch(lib, 2 * step)
        second, _ = batch(lib, 2 * step + 1)
        losses = functional.cross_entropy(model(first), targets), model(second).square().mean()
        optimizer.zero_grad()
        for loss in losses:
            loss.backward()
        optimizer.step()
        record(model, optimizer, losses[0], averaged={"second": losses[1]})


@program(without_ddp=_ONLY_THE_FIRST)
def two_backwards_of_one_graph(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        inputs, targets = batch(lib, step)
        outputs = model(inputs)
        optimizer.zero_grad()
        loss = functional.cross_entropy(outputs, targets)
        loss.backward(retain_graph=True)
        outputs.square().mean().backward()
        optimizer.step()
        record(model, optimizer, loss)


@program()
def a_graph_that_is_retained(lib: Library, record: Record) -> None:
    # The graph is kept for something that reaches no parameter.
    model = lib.DataParallel(mlp().to(lib.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        inputs, targets = batch(lib, step)
        inputs.requires_grad_()
        loss = functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward(retain_graph=True)
        (slope,) = torch.autograd.grad(loss, inputs)
        optimizer.step()
        record(model, optimizer, loss, averaged={"slope": slope.sum(0)})


class ActorAndCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(FEATURES, 8)
        self.actor, self.critic = nn.Linear(8, CLASSES), nn.Linear(8, 1)

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.trunk(states).tanh()
        return self.actor(hidden), self.critic(hidden)[:, 0]


@program()
def proximal_policy_optimisation(lib: Library, record: Record) -> None:
    model = lib.DataParallel(ActorAndCritic().to(lib.device))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for rollout in range(2):
        states, actions = batch(lib, rollout)
        rewards = states.sum(1)
        with torch.no_grad():
            before = model(states)[0].log_softmax(-1).gather(1, actions[:, None])[:, 0]
            advantages = rewards - model(states)[1]
        for _ in range(2):
            logits, values = model(states)
            ratio = (logits.log_softmax(-1).gather(1, actions[:, None])[:, 0] - before).exp()
            gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
            loss = -gain.mean() + 0.5 * functional.mse_loss(values, rewards)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            record(model, optimizer, loss)


@program()
def an_actor_and_a_critic_wrapped_apart(lib: Library, record: Record) -> None:
    # The actor's loss goes backward through the critic, whose gradients are thrown away.
    actor = lib.DataParallel(nn.Linear(FEATURES, 2).to(lib.device))
    critic = lib.DataParallel(nn.Linear(FEATURES + 2, 1).to(lib.device))
    of_actor = torch.optim.Adam(actor.parameters(), lr=0.01)
    of_critic = torch.optim.Adam(critic.parameters(), lr=0.01)
    for step in range(3):
        states, _ = batch(lib, step)
        with torch.no_grad():
            actions = actor(states)
        values = critic(torch.cat([states, actions], 1))
        loss = functional.mse_loss(values[:, 0], states.sum(1))
        of_critic.zero_grad()
        loss.backward()
        of_critic.step()
        advice = -critic(torch.cat([states, actor(states)], 1)).mean()
        of_actor.zero_grad()
        advice.backward()
        of_actor.step()
        record(
            {"actor": actor, "critic": critic},
            {"actor": of_actor, "critic": of_critic},
            loss,
            averaged={"advice": advice},
        )
