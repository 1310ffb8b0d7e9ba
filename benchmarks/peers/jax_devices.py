"""JAX on 2 virtual CPU devices of one process: state in shards as FSDP has it (stage 3), or whole on each device (stage 0).

Command:  python benchmarks/peers/jax_devices.py [--stage 0] [--dtype bf16] [--unrolled]
Takes:    about half a minute.
Needs:    jax, optax and numpy (the `bench` extra); no torch, so an environment of its own will do.
Expect:   one JSON line; its fields are those of `measure.py`.

The GPT of `gpt.py` with the same first params and the blocks' params stacked, run by `lax.scan` (`--unrolled`: one after another). Devices
share a process and exchange by memory: processor time and peak memory are the process's over 2, and nothing goes over loopback. The process
may use two cores, one a device. With bf16 params are cast where a block uses them; XLA chooses the dtype of its reductions.
"""

import os
import sys
import time
from collections.abc import Callable
from typing import Any

from measure import run, tell
from task import ADAMW, RANKS, Task, batch, init, parser


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--stage", type=int, default=3, choices=(0, 3))
    arguments.add_argument("--unrolled", action="store_true")
    options = arguments.parse_args()
    if sys.platform == "linux":
        os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[:RANKS]))
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={RANKS}"
    start, step = time.perf_counter(), train_step(Task(), options.stage, options.dtype, options.unrolled)
    tell(run(step, options, lambda x: [x], ranks_here=RANKS, start=start, name=f"jax-{options.stage}", reduce="XLA's choice"), 0)


def train_step(task: Task, stage: int, dtype: str, unrolled: bool) -> Callable[[int], float]:
    """From a step's number to its loss; the state is kept inside and donated."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    mesh = jax.make_mesh((RANKS,), ("data",), axis_types=(AxisType.Auto,))
    loss_fn = loss_function(task, jnp.bfloat16 if dtype == "bf16" else jnp.float32, unrolled)
    tx = optax.adamw(ADAMW["lr"], b1=ADAMW["b1"], b2=ADAMW["b2"], eps=ADAMW["eps"], weight_decay=ADAMW["weight_decay"])

    def sharding(path: Any, x: Any) -> NamedSharding:
        """The largest dimension that the devices divide; never the one along which blocks are stacked. Vectors stay whole."""
        first = 1 if "blocks" in jax.tree_util.keystr(path) else 0
        dims = [d for d in range(first, x.ndim) if x.shape[d] % RANKS == 0]
        if stage == 0 or x.ndim - first < 2 or not dims:
            return NamedSharding(mesh, PartitionSpec())
        split = max(dims, key=lambda d: x.shape[d])
        return NamedSharding(mesh, PartitionSpec(*("data" if d == split else None for d in range(x.ndim))))

    def update(params: Any, moments: Any, tokens: Any, targets: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens, targets)
        updates, moments = tx.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments, loss

    params = stacked(init(task), task.layers)
    moments = jax.eval_shape(tx.init, params)
    where = tuple(jax.tree_util.tree_map_with_path(sharding, x) for x in (params, moments))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    params = jax.device_put(params, where[0])
    moments = jax.jit(tx.init, out_shardings=where[1])(params)
    jitted = jax.jit(update, in_shardings=(*where, rows, rows), out_shardings=(*where, None), donate_argnums=(0, 1))

    def step(i: int) -> float:
        nonlocal params, moments
        params, moments, loss = jitted(params, moments, *(jax.device_put(x.astype(np.int32), rows) for x in batch(task, i)))
        jax.block_until_ready((params, moments))
        return float(loss)

    return step


def stacked(params: dict[str, Any], layers: int) -> Any:
    """The params by short names, those of the blocks stacked along a first dimension."""
    import numpy as np

    ends = {name.removesuffix(".weight"): x for name, x in params.items() if not name.startswith("blocks.")}
    parts = [name.removeprefix("blocks.0.") for name in params if name.startswith("blocks.0.")]
    blocks = {part.removesuffix(".weight"): np.stack([params[f"blocks.{i}.{part}"] for i in range(layers)]) for part in parts}
    return {**ends, "blocks": blocks}


def loss_function(task: Task, compute: Any, unrolled: bool) -> Callable[..., Any]:
    """(params, tokens `[batch, seq]`, targets) -> mean cross entropy; matrix products in `compute`, norms and softmax in float32."""
    import jax
    import jax.numpy as jnp
    import optax

    def norm(x: Any, weight: Any, bias: Any) -> Any:
        wide = x.astype(jnp.float32)
        centred = wide - wide.mean(-1, keepdims=True)
        return (centred * jax.lax.rsqrt(wide.var(-1, keepdims=True) + 1e-5) * weight + bias).astype(compute)

    def linear(x: Any, weight: Any) -> Any:
        return x @ weight.astype(compute).T

    def block(x: Any, p: Any) -> Any:
        y = linear(norm(x, p["norm1"], p["norm1.bias"]), p["qkv"])
        q, k, v = jnp.split(y.reshape(*x.shape[:2], 3 * task.heads, -1), 3, axis=2)
        x = x + linear(jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape), p["out"])
        y = jax.nn.gelu(linear(norm(x, p["norm2"], p["norm2.bias"]), p["up"]), approximate=True)
        return x + linear(y, p["down"])

    def loss_fn(params: Any, tokens: Any, targets: Any) -> Any:
        x = (params["tokens"][tokens] + params["positions"]).astype(compute)
        if unrolled:
            for i in range(task.layers):
                x = block(x, jax.tree.map(lambda leaf, i=i: leaf[i], params["blocks"]))
        else:
            x, _ = jax.lax.scan(lambda x, p: (block(x, p), None), x, params["blocks"])
        logits = linear(norm(x, params["norm"], params["norm.bias"]), params["head"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    return loss_fn


if __name__ == "__main__":
    main()
