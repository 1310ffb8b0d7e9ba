"""JAX's own `shard_map` on the cases, in a process of its own with 4 devices: `python -m tests.sharding.jax_shards OUT.npz`."""

import math
import os
import sys

WITHOUT_GRADIENT = {"all_to_all", "all_to_all_last"}  # of JAX 0.10: its transpose has the dimensions of an untiled exchange confused


def main(path: str) -> None:
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax  # noqa: PLC0415
    import jax.numpy as jnp  # noqa: PLC0415
    import numpy as np  # noqa: PLC0415

    from tests.sharding.shard_cases import GRID, global_shape, label, local, out_axes  # noqa: PLC0415

    found = {}
    for case in GRID:
        axes = case[1]
        devices = np.array(jax.devices()[: math.prod(axes.values())]).reshape(tuple(axes.values()))
        mesh, spec = jax.sharding.Mesh(devices, tuple(axes)), jax.sharding.PartitionSpec
        f = jax.shard_map(
            local(case, jax.lax), mesh=mesh, in_specs=spec(tuple(axes)), out_specs=spec(out_axes(case) or None), check_vma=False
        )
        x = jnp.sin(jnp.arange(math.prod(global_shape(case)), dtype=jnp.float32)).reshape(global_shape(case))

        def loss(x, f=f):
            y = f(x)
            return jnp.sum(y * jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape))

        found[f"{label(case)}/y"] = np.asarray(jax.jit(f)(x))
        if case[0] not in WITHOUT_GRADIENT:
            found[f"{label(case)}/gradient"] = np.asarray(jax.jit(jax.grad(loss))(x))
    np.savez(path, **found)


if __name__ == "__main__":
    main(sys.argv[1])
