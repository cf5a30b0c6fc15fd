"""A plan as a person reads it, at most 100 columns wide."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import truediv

from launcher.base.columns import columns, cropped
from launcher.base.redaction import escaped
from launcher.base.units import counted, format_bytes, format_count, format_duration, format_flops
from launcher.contract.actions import Action
from launcher.contract.config import PrecisionConfig
from launcher.contract.mesh import Cluster
from launcher.contract.model.checkpoint import first_step
from launcher.contract.plan import MemoryPlan, Plan, RolePlan, StagePlan, TrafficPlan
from launcher.contract.site import SiteConfig
from launcher.plan.cost.compute import SHORT_LAYER_S
from launcher.plan.rules.fusion import fusion_rows
from launcher.plan.rules.memory_fit import parts_bytes
from launcher.schedule.drawing.grid import draw

WIDTH = 100
_INDENT = "  "
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
_COMPUTE = re.compile(r"(\d+)([FBW])(\d+)")


def plan_text(plan: Plan, *, color: bool = False, data: Sequence[str] = ()) -> str:
    """The whole plan, section by section. ``color``: with the colours of a terminal. ``data``: what is known
    of the sources, which no plan depends on."""
    sections = {
        "Mesh": _mesh(plan),
        "Batch": _batch(plan),
        "Data": [part for row in data for part in _folded(escaped(row), WIDTH - len(_INDENT))],
        "Stages": _stages(plan),
        f"Schedule  {plan.schedule.name}": _schedule(plan, color=color),
        "Fusion": columns(fusion_rows(plan.config), left=3),
        "Memory per rank": _memory(plan),
        **_plugin_sections(plan, "memory"),
        "Traffic per step, on the rank that sends most of each kind": _traffic(plan),
        **_plugin_sections(plan, "traffic"),
        "Step": _step(plan),
        "Job": _job(plan.config.site),
        "Notes": _notes(plan.notes),
    }
    bold, plain = ("\x1b[1m", "\x1b[0m") if color else ("", "")
    blocks = [
        "\n".join([f"{bold}{heading}{plain}", *(f"{_INDENT}{line}".rstrip() for line in lines)])
        for heading, lines in sections.items()
        if lines
    ]
    return "\n\n".join([_title(plan), *blocks]) + "\n"


def _plugin_sections(plan: Plan, about: str) -> dict[str, list[str]]:
    return {section.title: list(section.lines) for section in plan.sections if section.about == about}


def _title(plan: Plan) -> str:
    config = plan.config
    lines = [
        f"{config.name}: {config.model.name} ({config.model.family}), "
        f"{format_count(plan.num_parameters)} parameters{_frozen(plan)}, {_formats(config.precision)}",
        f"{counted(plan.world_size, 'rank')} on {config.cluster.name}: {_devices(plan)}",
    ]
    if not plan.exact:
        lines.append("This architecture does not compute what one device computes.")
    return "\n".join(lines)


def _frozen(plan: Plan) -> str:
    return f" ({format_count(plan.num_frozen_parameters)} not trained)" if plan.num_frozen_parameters else ""


def _formats(precision: PrecisionConfig) -> str:
    is_mixed = precision.compute == "fp32" or precision.master_weights
    formats = precision.compute if is_mixed else f"pure {precision.compute}"
    formats += " with products in tf32" if precision.tf32 else ""
    return formats if formats == precision.name else f"{precision.name} ({formats})"


def _devices(plan: Plan) -> str:
    cluster, used = plan.config.cluster, plan.num_cluster_ranks
    text = f"{cluster.nodes} x {cluster.devices_per_node} {plan.config.device.name}"
    return text if used == cluster.nodes * cluster.devices_per_node else f"{text}, {used} used"


def _mesh(plan: Plan) -> list[str]:
    mesh, cluster = plan.mesh, Cluster(config=plan.config.cluster)
    product = " * ".join(f"{axis} {mesh.size(axis)}" for axis in mesh.order)
    first, last = cropped(range(mesh.num_ranks), 8, 2)
    rows = [["rank", "node", "device", *mesh.order]]
    for rank in [*first, *last]:
        coordinates = mesh.coordinates(rank)._asdict()
        at = [rank, cluster.node(rank), cluster.local_rank(rank), *(coordinates[axis] for axis in mesh.order)]
        rows.append([str(cell) for cell in at])
    table = columns(rows, left=0)
    if last:
        table.insert(1 + len(first), f"... {mesh.num_ranks - len(first) - len(last)} more ranks")
    others = [_other_role(role) for role in plan.roles if not role.trains]
    return [f"{counted(mesh.num_ranks, 'rank')} = {product}   (outermost axis first)", *others, *table]


def _other_role(role: RolePlan) -> str:
    nodes = "" if role.num_nodes is None else f", on {counted(role.num_nodes, 'further node')}"
    held = "" if role.memory_bytes is None else f", each holding {format_bytes(role.memory_bytes)}"
    return f"{counted(role.num_ranks, 'more rank')}: {role.name}{nodes}{held}"


def _batch(plan: Plan) -> list[str]:
    batch = plan.batch
    return [
        f"global {batch.global_size} = micro {batch.micro_size} * "
        f"{counted(batch.num_microbatches, 'microbatch')} * dp {plan.mesh.dp};  "
        f"{batch.num_tokens:,} {batch.unit} per step"
        + (f" ({batch.seq_length} each)" if batch.seq_length > 1 else "")
    ]


def _stages(plan: Plan) -> list[str]:
    first, last = cropped(plan.stages, 6, 2)
    halves = ["input gradient", "weight gradients"]
    times = ["forward", *(halves if plan.schedule.splits_backward else ["backward"])]
    recomputes = any(stage.recompute != "none" for stage in plan.stages)
    rows = [["stage", "pp_rank", "chunk", "layers", "", *["recomputed"] * recomputes, *times]]
    rows += [_stage_row(plan, stage, recomputes=recomputes) for stage in [*first, *last]]
    table = columns(rows, left=0)
    if last:
        table.insert(1 + len(first), f"... {len(plan.stages) - len(first) - len(last)} more stages")
    return table


def _stage_row(plan: Plan, stage: StagePlan, *, recomputes: bool) -> list[str]:
    layers = f"{stage.first_layer}" if stage.num_layers == 1 else f"{stage.layers[0]}-{stage.layers[-1]}"
    times = plan.schedule.forward_s, plan.schedule.backward_s, plan.schedule.weight_s
    ends = ["embedding"] * stage.has_prologue + ["head"] * stage.has_epilogue
    return [
        str(stage.stage),
        str(stage.pp_rank),
        str(stage.chunk),
        f"{stage.num_layers} ({layers})",
        " ".join(f"+ {end}" for end in ends),
        *[stage.recompute] * recomputes,
        *(format_duration(seconds[stage.stage]) for seconds in times if seconds),
    ]


def _schedule(plan: Plan, *, color: bool) -> list[str]:
    lists = [_compute(actions) for actions in plan.schedule.actions]
    width = WIDTH - len(_INDENT)
    drawn = draw(lists, plan.pipeline, width=width, color=color).splitlines()
    grid = [part for line in drawn for part in _folded(line, width)]
    formula = plan.schedule.bubble_formula
    bubble = [] if formula is None else [f"bubble {formula:.1%} by formula: equal stages, free messages"]
    bubble.append(f"bubble {plan.schedule.bubble_simulated:.1%} by simulation: these stages and messages")
    return [*grid, "", *bubble]


def _compute(actions: str) -> list[Action]:
    """The forwards and backwards alone: a big plan has hundreds of thousands of messages beside them."""
    return [Action(int(stage), kind, int(index)) for stage, kind, index in _COMPUTE.findall(actions)]


def _memory(plan: Plan) -> list[str]:
    limit = plan.config.device.memory_bytes
    names = list(dict.fromkeys(name for ranks in plan.memory for name in parts_bytes(ranks)))
    first, last = cropped([list(alike) for _, alike in groupby(plan.memory, _printed)], 6, 2)
    groups = [*first, *last]
    header = ["pp_rank", *(_span(group) for group in groups)]
    rows = [[name, *(_size(parts_bytes(group[0]).get(name, 0)) for group in groups)] for name in names]
    rows.append(["total", *(format_bytes(group[0].total_bytes) for group in groups)])
    rows.append(["of the device", *(f"{group[0].total_bytes / limit:.1%}" for group in groups)])
    rows.append(["stage inputs held", *(str(group[0].peak_microbatches) for group in groups)])
    table = columns([header, *rows])
    if last:
        table.append(f"(pp_ranks {first[-1][-1].pp_rank + 1}-{last[0][0].pp_rank - 1} lie between)")
    return [*table, f"each device has {format_bytes(limit)}"]


def _printed(ranks: MemoryPlan) -> tuple[object, ...]:
    """What is the same for pp_ranks that look the same when printed."""
    return (ranks.peak_microbatches, *((name, _size(size)) for name, size in parts_bytes(ranks).items()))


def _span(group: list[MemoryPlan]) -> str:
    first, last = group[0].pp_rank, group[-1].pp_rank
    return str(first) if first == last else f"{first}-{last}"


def _size(num_bytes: int) -> str:
    return format_bytes(num_bytes) if num_bytes else "-"


def _traffic(plan: Plan) -> list[str]:
    busiest: dict[tuple[str, str, str], TrafficPlan] = {}
    for row in plan.traffic:
        key = (row.purpose, row.axis, row.operation)
        if key not in busiest or row.sent_bytes > busiest[key].sent_bytes:
            busiest[key] = row
    if not busiest:
        return ["none: one rank"]
    inner_first = plan.mesh.order[::-1]
    rows = [["what", "axis", "operation", "messages", "each", "sent", "time", "can overlap"]]
    for row in sorted(busiest.values(), key=lambda row: (inner_first.index(row.axis), -row.sent_bytes)):
        overlaps = "yes" if row.overlappable else "no"
        numbers = [f"{row.count:,}", format_bytes(row.message_bytes), format_bytes(row.sent_bytes)]
        rows.append([row.purpose, row.axis, row.operation, *numbers, format_duration(row.time_s), overlaps])
    return columns(rows, left=3)


def _step(plan: Plan) -> list[str]:
    device, schedule = plan.config.device, plan.schedule
    peak = device.peak_flops[plan.config.precision.products]
    speed = f"{format_count(plan.predicted_speed)} {plan.batch.unit}/s"
    per_device = plan.step_flops / schedule.step_s / plan.num_devices
    share = f"{format_flops(per_device)}/s per device = {per_device / peak:.0%} of the peak"
    step, num_layers = format_duration(schedule.step_s), (stage.num_layers for stage in plan.stages)
    layer_s = min(map(truediv, schedule.forward_s, num_layers))
    assumed = (
        f"The model takes {format_flops(plan.step_flops)} per step. Assumed: matmuls reach "
        f"{device.attainable_fraction:.0%} of {format_flops(peak)}/s {plan.config.precision.products}, other "
        "operations the bandwidth of the memory."
    )
    if device.measured_in is not None:
        assumed = (
            f"The model takes {format_flops(plan.step_flops)} per step. Times of layers are those that "
            f"{device.measured_in} measured of its stages; the rest is predicted."
        )
    first, about = f"{step} predicted: {speed}, {share}", "about"
    if layer_s < SHORT_LAYER_S and device.measured_in is None:
        first, about = f"at least {step}, predicted: at most {speed}, {share}", "at least"
        short = f"as short as these ({format_duration(layer_s)} forward)"
        assumed += f" Not counted: the start of operations, which layers {short} mostly wait for."
    num_steps = plan.config.train.num_steps - first_step(plan.config.train)
    whole = f"{counted(num_steps, 'step')}: {about} {format_duration(num_steps * schedule.step_s)}"
    report, has_baseline = plan.config.report, plan.config.report.baseline == "auto" and plan.world_size > 1
    base = f"baseline on one device: the first {counted(report.num_baseline_steps, 'step')}"
    bases = [base] if has_baseline and num_steps > report.num_baseline_steps else []
    return [first, whole, *bases, *textwrap.wrap(assumed, WIDTH - len(_INDENT))]


def _job(site: SiteConfig) -> list[str]:
    """What the settings ask of the scheduler beside the nodes, and of the surroundings of the ranks."""
    variables = {**site.env, **site.node_env, **({"TMPDIR": site.scratch} if site.scratch else {})}
    rows = {
        "site": [site.name] if site.name != SiteConfig().name else [],
        "time limit": [site.time_limit or ""],
        "modules": site.modules,
        "environment": [f"{name}={value}" for name, value in variables.items()],
        "copied from where it is submitted": [*site.forward, *(f"{name} (secret)" for name in site.secrets)],
        "container": [site.container_image or ""],
        "mounts": site.container_mounts,
    }
    return [
        line
        for name, items in rows.items()
        if any(items)
        for line in textwrap.wrap(
            escaped(f"{name}: {', '.join(items)}"), WIDTH - len(_INDENT), subsequent_indent=_INDENT
        )
    ]


def _folded(line: str, width: int) -> list[str]:
    """The line in parts of at most ``width`` visible characters; only a legend is ever that long."""
    is_long = len(_ESCAPE.sub("", line)) > width
    return textwrap.wrap(line, width, subsequent_indent=_INDENT) if is_long else [line]


def _notes(notes: Iterable[str]) -> list[str]:
    return [
        line
        for note in notes
        for line in textwrap.wrap(note, WIDTH - len(_INDENT) - 2, initial_indent="- ", subsequent_indent="  ")
    ]
