"""Keep ZeRO-3's gathered parameters for a full step where they fit, to gather less often than DeepSpeed (patches.py).

DeepSpeed releases a block's parameters after each pass that does not use them again soon. A gradient cache makes 2M
passes over M micro-batches. So DeepSpeed gathers them 2M times per step, and the host counts parameters before and
after each module. But the parameters do not change before the update, and DeepSpeed itself keeps those that are used
again within `stage3_max_reuse_distance`.

This module acts on models with at most `stage3_max_reuse_distance` and `stage3_max_live_parameters` parameters. They
keep what the first forward of a step gathered until the update or an evaluation. After that forward the hooks do
nothing for gathered modules. DeepSpeed handles larger models, and offloaded parameters, as without the patch.

The first forward runs DeepSpeed's hooks in every module, so that the trace for prefetching remains that of a forward.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from infcl.engine.patches import POST_BACKWARD, POST_FORWARD, PRE_BACKWARD, PRE_FORWARD, RELEASE, RELEASE_ALL


class KeptParameters:
    """Patches of an optimizer's stage-3 hooks. While `on`, parameters are released only at the update.

    Attributes:
        fits: whether the model is small enough to stay gathered.
        on: whether parameters are kept now.
        gathered: whether a full forward has gathered all parameters since the last update.
    """

    def __init__(self, optimizer: Any, *, in_host_memory: bool):
        from deepspeed.runtime.zero import parameter_offload
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

        hooks = optimizer.parameter_offload
        total = sum(parameter.ds_numel for parameter in hooks.module.parameters())
        limit = min(hooks._max_available_parameters_in_numel, hooks._max_reuse_distance_in_numel)
        self.fits = total <= limit and not in_host_memory
        self.on = self.fits
        self.gathered = False
        self._root = hooks.module
        self._available, self._stack = ZeroParamStatus.AVAILABLE, parameter_offload.FWD_MODULE_STACK
        self._iterate, self._is_leaf = parameter_offload.iter_params, parameter_offload.z3_leaf_module
        self._parameters: dict[Any, list[Any]] = {}  # parameters per module, or per unit that is gathered as one
        self._entered: set[tuple[Any, str]] = set()  # (module, pass) whose DeepSpeed hook was entered and not left
        if self.fits:
            self._replace(hooks, hooks.get_param_coordinator())

    def keep(self, wanted: bool) -> None:
        """Keep parameters or not. With False, forwards between steps release as DeepSpeed does."""
        self.on = wanted and self.fits
        self.gathered = self.gathered and self.on

    def _replace(self, hooks: Any, coordinator: Any) -> None:
        RELEASE.apply(coordinator, self._unless_kept)
        RELEASE_ALL.apply(coordinator, self._for_the_update)
        for pass_, before, after in (
            ("forward", PRE_FORWARD, POST_FORWARD),
            ("backward", PRE_BACKWARD, POST_BACKWARD),
        ):
            before.apply(hooks, partial(self._on_entry, pass_))
            after.apply(hooks, partial(self._on_exit, pass_))

    def _unless_kept(self, release: Callable[..., None]) -> Callable[..., None]:
        def release_unless_kept(parameter: Any, *args: Any, **options: Any) -> None:
            if not self.on:
                release(parameter, *args, **options)

        return release_unless_kept

    def _for_the_update(self, release_all: Callable[[Any], None]) -> Callable[[Any], None]:
        def release_for_the_update(module: Any) -> None:
            kept, self.on = self.on, False
            self.gathered = False
            self._entered.clear()
            try:
                release_all(module)
            finally:
                self.on = kept

        return release_for_the_update

    def _on_entry(self, pass_: str, fetch: Any) -> Any:
        def enter(module: Any) -> None:
            if self.gathered and self._is_whole(module):
                if pass_ == "forward":
                    self._stack.append(module)  # the hook after the forward pops it
                return
            self._entered.add((module, pass_))
            fetch(module)

        return enter

    def _on_exit(self, pass_: str, leave: Any) -> Any:
        def exit_(module: Any) -> None:
            if (module, pass_) in self._entered:
                self._entered.discard((module, pass_))
                leave(module)
            if module is self._root and pass_ == "forward":
                self.gathered = self.on

        return exit_

    def _is_whole(self, module: Any) -> bool:
        if module not in self._parameters:
            self._parameters[module] = list(self._iterate(module, recurse=self._is_leaf(module)))
        return all(parameter.ds_status is self._available for parameter in self._parameters[module])
