"""The optimizer: AdamW, or Muon on matrices with AdamW on the rest; parameters go to groups by ordered rules.

A domain (language, vision) hands in its list of `Rule`s; this file knows no parameter names. `build_optimizer` makes
one `torch.optim.Optimizer` and a table of its groups. Muon and AdamW live in one optimizer class because Lightning's
automatic optimization (clipping, accumulation, scheduler, checkpoint) takes only one optimizer.

Muon follows the paper's training appendix: Nesterov momentum 0.95, Newton-Schulz orthogonalisation, update scaled by
0.2 sqrt(max(rows, cols)) so that its RMS matches AdamW's, decoupled weight decay. It agrees with
`torch.optim.Muon(adjust_lr_fn="match_rms_adamw")`, which takes 2-D parameters only and one matrix at a time.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.adamw import adamw

OptimizerName = Literal["adamw", "muon_adamw"]
Algorithm = Literal["adamw", "muon"]
Decay = Literal["all", "matrices"]

BASE_LR_SAMPLES = 256  # `base_lr` is the learning rate at this effective batch size

# The quintic of Newton-Schulz, as in torch.optim.Muon: a steep slope at zero at the price of singular values that end
# anywhere in about [0.7, 1.2].
NEWTON_SCHULZ_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_EPS = 1e-7
# The iteration tolerates bfloat16 and runs faster in it, as in torch.optim.Muon. But it magnifies the last bits of
# gradients, so that sums in another order show: tests of how a step is cut over devices compute in float32.
NEWTON_SCHULZ_TYPE = torch.bfloat16

# Equal matrices are orthogonalised together up to this many elements; about five bf16 copies of a batch live at once.
MAX_BATCH_ELEMENTS = 2**24

# On a CPU a batched product is 7 times faster at 64 rows, but 10% slower at 426, and an expert's matrices fit the cache
# where its whole stack does not: larger matrices go one by one there, from the gradient to the update.
CPU_MAX_BATCHED_ROWS = 256


# ---------------------------------------------------------------------------------------------------------------------
# Configuration
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class MuonConfig:
    """Settings of the Muon half of `muon_adamw`.

    Raises:
        ValueError: a value out of range.
    """

    momentum: float = 0.95
    """Decay of the running mean of gradients, in [0, 1)."""

    nesterov: bool = True
    """Look one momentum step ahead."""

    ns_steps: int = 5
    """Newton-Schulz iterations per step."""

    gates: Algorithm = "adamw"
    """Which half trains the gate matrices u and v of MoA layers. The paper found no difference and uses `adamw`."""

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ValueError(f"optimizer.muon.momentum is {self.momentum}: it must lie in [0, 1)")
        if not 1 <= self.ns_steps < 100:
            raise ValueError(f"optimizer.muon.ns_steps is {self.ns_steps}: it must lie in 1 .. 99")
        _check_choice("optimizer.muon.gates", self.gates, Algorithm)


@dataclass
class OptimizerConfig:
    """The optimizer of a run. Give exactly one of `lr` and `base_lr`.

    Raises:
        ValueError: an unknown name, a value out of range, or a setting that the named optimizer does not use.
    """

    name: OptimizerName = "adamw"
    """`adamw` for every parameter, or `muon_adamw`: Muon on the matrices that the domain names, AdamW on the rest."""

    lr: float | None = None
    """Peak learning rate."""

    base_lr: float | None = None
    """Peak learning rate per 256 samples of the global batch: lr = base_lr * global batch / 256."""

    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay of the running means of the gradient and of its square."""

    eps: float = 1e-8
    """AdamW's term against division by zero."""

    weight_decay: float = 0.1
    """Decoupled weight decay: each step takes lr * weight_decay off a parameter, in AdamW and in Muon."""

    decay: Decay = "all"
    """`all`: every parameter decays. `matrices`: what the domain exempts (biases, norms, tokens, tables) does not."""

    fused: bool | None = None
    """AdamW's fused kernel. null: used on CPU and CUDA, where it is the fastest."""

    muon: MuonConfig | None = None
    """Settings of Muon; only with `muon_adamw`. null: the defaults."""

    def __post_init__(self) -> None:
        _check_choice("optimizer.name", self.name, OptimizerName)
        _check_choice("optimizer.decay", self.decay, Decay)
        if (self.lr is None) == (self.base_lr is None):
            problem = "neither is" if self.lr is None else "both are"
            raise ValueError(f"optimizer: give one of lr and base_lr, {problem} set (set the other to null)")
        for key in ("lr", "base_lr", "eps"):
            value = getattr(self, key)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"optimizer.{key} is {value}: it must be a positive number")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optimizer.betas is {list(self.betas)}: two numbers in [0, 1) are needed")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"optimizer.weight_decay is {self.weight_decay}: it must be zero or more")
        if self.muon is not None and self.name != "muon_adamw":
            raise ValueError(f"optimizer.muon is set but optimizer.name is {self.name!r}: remove it or use muon_adamw")

    def peak_lr(self, global_batch_size: int | None = None) -> float:
        """The absolute learning rate.

        Args:
            global_batch_size: samples per optimizer step over all devices and accumulated micro-batches; only `base_lr`
                needs it.
        """
        if self.lr is not None:
            return self.lr
        assert self.base_lr is not None
        if global_batch_size is None or global_batch_size < 1:
            raise ValueError(f"optimizer.base_lr needs a global batch size, got {global_batch_size}: set optimizer.lr")
        return self.base_lr * global_batch_size / BASE_LR_SAMPLES


def _check_choice(key: str, value: str, choices: Any) -> None:
    if value not in get_args(choices):
        raise ValueError(f"{key} {value!r} is unknown: choose one of {', '.join(get_args(choices))}")


# ---------------------------------------------------------------------------------------------------------------------
# Routing: which parameter belongs to which group
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """Sends parameters to a group. Rules are tried in order, the first that matches wins.

    Several rules may feed one group if they agree on `optimizer`, `decay` and `lr_multiplier`.
    """

    group: str
    """Name of the group, as shown in the table and by learning-rate monitors."""

    pattern: str = ""
    """Regular expression searched for in the parameter's name. The empty pattern is found in every name."""

    when: Callable[[str, Tensor], bool] | None = None
    """Further condition on (name, parameter), for example its number of dimensions."""

    optimizer: Algorithm = "adamw"
    """`muon` takes matrices (rows, cols) and stacks of matrices (n, rows, cols)."""

    decay: bool = True
    """False: exempt from weight decay when `OptimizerConfig.decay` is `matrices`."""

    lr_multiplier: float = 1.0
    """Learning rate of the group as a multiple of the peak."""

    optional: bool = False
    """True: no error if the rule matches nothing."""

    def matches(self, name: str, parameter: Tensor) -> bool:
        return re.search(self.pattern, name) is not None and (self.when is None or self.when(name, parameter))

    @property
    def settings(self) -> tuple[str, bool, float]:
        return self.optimizer, self.decay, self.lr_multiplier


def decay_rules(no_decay: Sequence[str] = ()) -> list[Rule]:
    """The generic pair of groups: `no_decay` for vectors, scalars and the named parameters, `decay` for the rest.

    Args:
        no_decay: regular expressions of further exempt names (position tables, class token); each must match something.
    """
    named = [Rule("no_decay", pattern, decay=False) for pattern in no_decay]
    vectors = Rule("no_decay", when=lambda name, parameter: parameter.ndim < 2, decay=False, optional=True)
    return [*named, vectors, Rule("decay", optional=True)]


def assign_parameters(
    named_parameters: Iterable[tuple[str, Parameter]], rules: Sequence[Rule]
) -> list[tuple[Rule, list[Parameter]]]:
    """Splits parameters into groups by the first rule that matches.

    Frozen parameters are skipped, and a parameter with several names is taken once, under its first name.

    Returns:
        (rule, parameters) per group, in the order of the rules, without empty groups.

    Raises:
        ValueError: a parameter that no rule matches, a rule (not optional) that matches nothing, rules of one group
            that disagree, or a parameter that Muon cannot take.
    """
    leaders: dict[str, Rule] = {}
    for rule in rules:
        _check_choice(f"optimizer of rule {rule.group!r}:", rule.optimizer, Algorithm)
        if leaders.setdefault(rule.group, rule).settings != rule.settings:
            raise ValueError(f"optimizer rules of group {rule.group!r} disagree on optimizer, decay or lr_multiplier")

    members: dict[str, list[Parameter]] = {group: [] for group in leaders}
    used: set[int] = set()  # indices of rules
    seen: set[int] = set()  # ids of parameters
    left_over: list[str] = []
    for name, parameter in named_parameters:
        index = next((i for i, rule in enumerate(rules) if rule.matches(name, parameter)), None)
        if index is not None:
            used.add(index)  # also by a frozen or repeated parameter: the rule itself is not a mistake
        if not parameter.requires_grad or id(parameter) in seen:
            continue
        seen.add(id(parameter))
        if index is None:
            left_over.append(f"{name} {tuple(parameter.shape)}")
            continue
        _check_muon_shape(rules[index], name, parameter)
        members[rules[index].group].append(parameter)

    if left_over:
        more = f" and {len(left_over) - 5} more" if len(left_over) > 5 else ""
        raise ValueError(f"no optimizer rule matches {', '.join(left_over[:5])}{more}: add a rule")
    for index, rule in enumerate(rules):
        if index not in used and not rule.optional:
            raise ValueError(f"optimizer rule {rule.group!r} (pattern {rule.pattern!r}) matches no parameter: mend it")
    return [(rule, members[group]) for group, rule in leaders.items() if members[group]]


def _check_muon_shape(rule: Rule, name: str, parameter: Tensor) -> None:
    if rule.optimizer == "muon" and parameter.ndim not in (2, 3):
        raise ValueError(
            f"optimizer rule {rule.group!r} sends {name} {tuple(parameter.shape)} to Muon, which takes matrices "
            "(rows, cols) and stacks of them (n, rows, cols): give it an adamw rule"
        )


# ---------------------------------------------------------------------------------------------------------------------
# Muon
# ---------------------------------------------------------------------------------------------------------------------


def newton_schulz(matrices: Tensor, steps: int) -> Tensor:
    """Moves every singular value of each matrix close to one, keeping the singular vectors.

    Args:
        matrices: (rows, cols) or (n, rows, cols), with rows <= cols, which keeps the Gram matrices small.
        steps: iterations of X <- a X + (b G + c G G) X with G = X X^T.

    Returns:
        The same shape. Zero matrices stay zero.
    """
    a, b, c = NEWTON_SCHULZ_COEFFICIENTS
    add_product = torch.addmm if matrices.ndim == 2 else torch.baddbmm
    norms = torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True)
    x = matrices / norms.clamp(min=NEWTON_SCHULZ_EPS)  # spectral norm at most 1
    for _ in range(steps):
        gram = x @ x.mT
        polynomial = add_product(gram, gram, gram, beta=b, alpha=c)
        x = add_product(x, polynomial, x, beta=a)
    return x


def orthogonalise(updates: Sequence[Tensor], steps: int) -> list[Tensor]:
    """`newton_schulz` of tensors that hold equal matrices up to transposition, in one batch.

    Args:
        updates: each (rows, cols) or (n, rows, cols).

    Returns:
        Tensors of the same shapes, in `NEWTON_SCHULZ_TYPE`.
    """
    wide = [(update.mT if _is_tall(update) else update).to(NEWTON_SCHULZ_TYPE).contiguous() for update in updates]
    if len(wide) == 1:
        results = [newton_schulz(wide[0], steps)]
    else:
        stacks = [matrices.reshape(-1, *matrices.shape[-2:]) for matrices in wide]
        split = newton_schulz(torch.cat(stacks), steps).split([len(stack) for stack in stacks])
        results = [result.reshape(matrices.shape) for result, matrices in zip(split, wide, strict=True)]
    return [result.mT if _is_tall(update) else result for update, result in zip(updates, results, strict=True)]


def _is_tall(matrices: Tensor) -> bool:
    return matrices.shape[-2] > matrices.shape[-1]


def batches_of_equal_matrices(parameters: Iterable[Tensor], max_elements: int) -> list[list[Tensor]]:
    """Parameters whose matrices have the same shape up to transposition, in batches of at most `max_elements` elements.

    A parameter is never split, so a stack larger than the limit is a batch of its own.
    """
    batches: list[list[Tensor]] = []
    open_batches: dict[Any, tuple[list[Tensor], int]] = {}  # by kind: the batch being filled and its elements
    for parameter in parameters:
        kind = (tuple(sorted(parameter.shape[-2:])), parameter.device)
        batch, elements = open_batches.get(kind, (None, 0))
        if batch is None or elements + parameter.numel() > max_elements:
            batch, elements = [], 0
            batches.append(batch)
        batch.append(parameter)
        open_batches[kind] = (batch, elements + parameter.numel())
    return batches


class MuonAdamW(torch.optim.Optimizer):
    """Muon on some groups and AdamW on the others, as one optimizer.

    An attribute `found_inf`, a scalar tensor on the device, makes `step` do nothing where it is not 0, as it does in
    torch's fused optimizers: neither weights nor state change, and the host need not know. (AdamW groups: if fused.)

    Every group carries `optimizer`, "muon" or "adamw". The AdamW half is torch's own; the Muon half takes matrices
    (rows, cols) and stacks (n, rows, cols) whose every slice is a matrix of its own, as the experts of a layer are.

    Args:
        params: groups, dicts with `params` and `optimizer`; other keys override the arguments below for that group.
        lr, weight_decay: both halves.
        betas, eps, fused: AdamW.
        momentum, nesterov, ns_steps: Muon.

    Raises:
        ValueError: a group without a valid `optimizer`, or a Muon group with a parameter that is no matrix or stack.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        fused: bool = False,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "fused": fused,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        _check_choice("optimizer of a parameter group:", group.get("optimizer", ""), Algorithm)
        for parameter in group["params"]:
            _check_muon_shape(Rule(group.get("name", "?"), optimizer=group["optimizer"]), "a parameter", parameter)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update. Parameters without a gradient are left alone; gradients are never written to."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if group["optimizer"] == "muon":
                self._muon_step(group)
            else:
                self._adamw_step(group)
        return loss

    def _muon_step(self, group: dict[str, Any]) -> None:
        skip = getattr(self, "found_inf", None)
        parameters = [p for p in group["params"] if p.grad is not None]
        if any(is_sharded(p) for p in parameters):
            from pretrain.muon_shards import is_split, step_of_split_matrices  # only where distributed training exists

            split = [p for p in parameters if is_split(p)]
            parameters = [p for p in parameters if not is_split(p)]
            if split:
                step_of_split_matrices(split, [self._momentum_buffer(p) for p in split], group, skip)
        triples = {}
        for parameter in parameters:
            triple = (local(parameter), local(parameter.grad), local(self._momentum_buffer(parameter)))
            triples[id(triple[0])] = triple
        here = [parameter for parameter, _, _ in triples.values() if parameter.numel()]
        for batch in batches_of_equal_matrices(here, MAX_BATCH_ELEMENTS):
            together = [triples[id(parameter)] for parameter in batch]
            for some in _one_by_one(together) if prefers_single_matrices(batch[0]) else [together]:
                _muon_update(some, group, skip)

    def _momentum_buffer(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state["momentum_buffer"]

    def _adamw_step(self, group: dict[str, Any]) -> None:
        parameters = [p for p in group["params"] if p.grad is not None]
        states = [self._adamw_state(p, group["fused"]) for p in parameters]
        adamw(
            [local(p) for p in parameters],
            [local(p.grad) for p in parameters],
            [local(state["exp_avg"]) for state in states],
            [local(state["exp_avg_sq"]) for state in states],
            [],
            [state["step"] for state in states],
            fused=group["fused"] or None,  # None, not False: torch then chooses foreach by device, as its AdamW does
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
            found_inf=getattr(self, "found_inf", None) if group["fused"] else None,
        )

    def _adamw_state(self, parameter: Tensor, fused: bool) -> dict[str, Tensor]:
        state = self.state[parameter]
        if not state:
            # The fused kernel reads the step on the device; otherwise it stays on the CPU to spare kernel launches.
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device if fused else "cpu")
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state


def is_sharded(tensor: Tensor) -> bool:
    """Return whether each device holds but a slice of this (a DTensor)."""
    return hasattr(tensor, "to_local")


def local(tensor: Any) -> Tensor:
    """Return this device's slice of a sharded tensor, which shares its memory; of another the tensor itself."""
    return tensor.to_local() if is_sharded(tensor) else tensor


# A parameter, its gradient and its momentum buffer; or the same of one matrix of a stack.
Triple = tuple[Tensor, Tensor, Tensor]


def prefers_single_matrices(matrices: Tensor) -> bool:
    """Return whether these are faster one by one than in a batch."""
    return matrices.device.type == "cpu" and min(matrices.shape[-2:]) > CPU_MAX_BATCHED_ROWS


def _one_by_one(triples: list[Triple]) -> Iterator[list[Triple]]:
    """Each matrix alone, as views: what is written to them is written to the parameter and its buffer."""
    for triple in triples:
        if triple[0].ndim == 2:
            yield [triple]
        else:
            yield from ([single] for single in zip(*triple, strict=True))


def _muon_update(triples: list[Triple], group: dict[str, Any], skip: Tensor | None) -> None:
    """Update matrices of one shape in place; not at all where `skip`, a scalar on the device, is not 0."""
    updates = [momentum_update(gradient, buffer, group, skip) for _, gradient, buffer in triples]
    for (parameter, _, _), direction in zip(triples, orthogonalise(updates, group["ns_steps"]), strict=True):
        move(parameter, direction, group, max(parameter.shape[-2:]), skip)


def momentum_update(gradient: Tensor, buffer: Tensor, group: dict[str, Any], skip: Tensor | None) -> Tensor:
    """Add a gradient to its running mean, in place, and return what is to be orthogonalised."""
    if skip is not None:
        gradient = torch.where(skip > 0, buffer, gradient)  # a buffer that goes to where it is stays
    buffer.lerp_(gradient, 1 - group["momentum"])
    update = gradient.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
    return update.to(NEWTON_SCHULZ_TYPE)  # one by one, so that no second fp32 copy of a whole batch exists


def move(parameter: Tensor, direction: Tensor, group: dict[str, Any], longest: int, skip: Tensor | None) -> None:
    """Decay a matrix (or some of its rows) and move it, in place.

    Args:
        longest: the longer side of the whole matrix: the update gets the RMS of AdamW's, for any shape.
    """
    decay: float | Tensor = 1 - group["lr"] * group["weight_decay"]
    if skip is not None:
        decay, direction = torch.where(skip > 0, 1.0, decay), torch.where(skip > 0, 0.0, direction)
    parameter.mul_(decay)
    parameter.add_(direction, alpha=-group["lr"] * 0.2 * math.sqrt(longest))


# ---------------------------------------------------------------------------------------------------------------------
# Building
# ---------------------------------------------------------------------------------------------------------------------


def build_optimizer(
    config: OptimizerConfig,
    named_parameters: Iterable[tuple[str, Parameter]],
    rules: Sequence[Rule],
    global_batch_size: int | None = None,
) -> tuple[torch.optim.Optimizer, list[dict[str, Any]]]:
    """The optimizer of a model and the table of its groups.

    Args:
        config: which optimizer, and its settings.
        named_parameters: `model.named_parameters()`.
        rules: the domain's routing, first match wins.
        global_batch_size: samples per optimizer step; only `base_lr` needs it.

    Returns:
        The optimizer, whose groups carry their `name`, and one row per group for `format_table` or a JSON file.

    Raises:
        ValueError: see `assign_parameters`; also rules that do not go with `config.name`.
    """
    groups = assign_parameters(named_parameters, rules)
    if not groups:
        raise ValueError("the model has no trainable parameter: nothing to optimize")
    uses_muon = any(rule.optimizer == "muon" for rule, _ in groups)
    if uses_muon != (config.name == "muon_adamw"):
        problem = "some rules send parameters" if uses_muon else "no rule sends a parameter"
        raise ValueError(f"optimizer.name is {config.name!r} but {problem} to Muon: change the name or the rules")

    lr = config.peak_lr(global_batch_size)
    param_groups = []
    for rule, parameters in groups:
        group = {"name": rule.group, "params": parameters, "lr": lr * rule.lr_multiplier}
        group["weight_decay"] = config.weight_decay if rule.decay or config.decay == "all" else 0.0
        if config.name == "muon_adamw":
            group["optimizer"] = rule.optimizer
        param_groups.append(group)

    fused = config.fused
    if fused is None:
        fused = all(p.device.type in ("cpu", "cuda") for _, parameters in groups for p in parameters)
    optimizer: torch.optim.Optimizer
    if config.name == "muon_adamw":
        muon = config.muon or MuonConfig()
        optimizer = MuonAdamW(
            param_groups,
            lr,
            betas=config.betas,
            eps=config.eps,
            fused=fused,
            momentum=muon.momentum,
            nesterov=muon.nesterov,
            ns_steps=muon.ns_steps,
        )
    else:
        optimizer = torch.optim.AdamW(param_groups, lr, betas=config.betas, eps=config.eps, fused=fused or None)
        # Fused AdamW offers to unscale fp16 gradients inside its step. Lightning then refuses to clip, under bf16 too.
        # Without the offer the gradients are unscaled before, which any other optimizer gets.
        optimizer._step_supports_amp_scaling = False
    return optimizer, group_table(optimizer)


def group_table(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """One row per group: `group`, `tensors`, `parameters`, `optimizer`, `lr`, `weight_decay`. Plain data for JSON."""
    return [
        {
            "group": group["name"],
            "tensors": len(group["params"]),
            "parameters": sum(p.numel() for p in group["params"]),
            "optimizer": group.get("optimizer", "adamw"),
            "lr": group["lr"],
            "weight_decay": group["weight_decay"],
        }
        for group in optimizer.param_groups
    ]


def format_table(rows: Sequence[dict[str, Any]]) -> str:
    """`group_table` as text, with a line of totals."""
    total = {"group": "total", "tensors": sum(row["tensors"] for row in rows)}
    total["parameters"] = sum(row["parameters"] for row in rows)
    header = f"{'group':<16}{'tensors':>8}{'parameters':>15}  {'optimizer':<10}{'lr':>10}{'decay':>8}"
    lines = [
        f"{row['group']:<16}{row['tensors']:>8}{row['parameters']:>15,}  "
        f"{row['optimizer']:<10}{row['lr']:>10.3g}{row['weight_decay']:>8.3g}"
        for row in rows
    ]
    return "\n".join([header, *lines, f"{total['group']:<16}{total['tensors']:>8}{total['parameters']:>15,}"])
