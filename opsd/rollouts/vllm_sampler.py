"""The running vLLM engine: samples, takes over the trainer's weights, proves that they arrived. Imported only when one is built."""

from __future__ import annotations

import atexit
import gc
import math
import os
import sys
from math import nan
from typing import TYPE_CHECKING, Any

import torch

from opsd import chat
from opsd.batching import sequences
from opsd.endings import EngineFailure
from opsd.rollouts.base import Sampler, diverged, require_room
from opsd.rollouts.vllm import COOLEST
from opsd.rollouts.vllm_start import as_it_was, failure
from opsd.rollouts.vllm_weights import AdapterFile, Digest, held, is_repacked, send, weights
from opsd.scoring import evaluating, hidden_at, project
from opsd.types import FinishReason, LoadedModel, Request, Response, Sampling

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput

PROBE = "What is 17 plus 25?"
PROBE_ROWS, PROBE_TOKENS = 4, 8
# Not greedy: its tokens are near certain, and the log-prob of what is near certain hardly changes with the weights
PLAIN = Sampling(temperature=1.0, top_p=1.0, top_k=None, max_len=PROBE_TOKENS)
REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


class VllmSampler(Sampler):
    def __init__(self, loaded: LoadedModel, llm: LLM, *, adapter: bool, processed: bool, sleep: bool, max_gap: float) -> None:
        self.loaded, self.processed, self.max_gap = loaded, processed, max_gap
        self.llm: LLM | None = llm
        self.alive = True
        self.alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
        client: Any = llm.llm_engine.engine_core
        client._finalizer.detach()  # dropped, or at exit, the engine would end torch's groups, whoever has them in use
        atexit.register(gc.unfreeze)  # it froze all objects; those that are never collected are reported as leaks at exit
        self.dtype = llm.model_config.dtype
        self.parallel = llm.llm_engine.vllm_config.parallel_config.tensor_parallel_size
        self.max_rows = llm.llm_engine.vllm_config.scheduler_config.max_num_seqs
        self.on_cpu = loaded.device.type == "cpu"
        self.sleeps, self.asleep = sleep and not self.on_cpu, False
        self.repacked, self.readable = is_repacked(llm), self.parallel == 1
        self.adapter = AdapterFile(loaded, dtype=self.dtype) if adapter else None
        self.weights_version = self.num_syncs = 0
        self.uneven = ""  # what was counted where not all can be read
        self.last: tuple[Any, Any] = (None, None)  # the digests of the last sync, sent and held
        self.probe_ids = chat.encode_text(loaded.tokenizer, PROBE)

    @property
    def ranks_together(self) -> int:
        return self.parallel

    @property
    def notes(self) -> list[str]:
        """Complete after the first sync."""
        notes = []
        if self.on_cpu:
            notes.append("rollout=vllm on a CPU: rollout.sleep, rollout.cuda_graphs and rollout.gpu_memory have no effect.")
            if self.adapter is not None:
                notes.append("rollout.sync=adapter on a CPU decodes 2 to 7 times slower than rollout.sync=merged.")
        else:
            notes.append("rollout=vllm on a GPU: rollout.kv_cache_gb has no effect.")
        if self.parallel > 1:
            notes.append(
                f"rollout.tensor_parallel={self.parallel}: no process holds all weights; the digest only sees whether they change."
            )
        elif not self.readable:
            notes.append(
                f"rollout=vllm: it keeps this model's weights in another form ({self.uneven}): the digest only sees whether they "
                "change."
            )
        elif self.repacked:
            notes.append("rollout=vllm: this build repacks linear layers; the digest reads some of their columns at each sync.")
        return notes

    def generate(self, requests: list[Request], *, sampling: Sampling) -> list[Response]:
        """One response for each request, in order, from one call of the engine. `sampling.temperature=0` is greedy decoding.

        On a terminal a bar shows the way through more requests than are decoded at one time.

        Raises:
            ValueError: a prompt leaves fewer than `max_len` tokens of the model's context.
            FloatingPointError: the model's logits are not finite.
            EngineFailure: the engine died, or gave up a request.
        """
        require_room(requests, sampling.max_len, context=self.loaded.context)
        if 0 < sampling.temperature < COOLEST:
            raise ValueError(f"temperature={sampling.temperature}: vLLM samples at {COOLEST} at least; raise it, or set 0.")
        responses = []
        if requests:
            responses = [self._response(output, sampling) for output in self._run(self._awake(), requests, sampling)]
        self.rest()
        return responses

    def rest(self) -> None:
        if self.sleeps and not self.asleep:
            llm = self._awake()
            # Level 1 keeps the weights, on the host: what is sampled next may be an evaluation of the same ones
            self._ask("sleep", lambda: llm.sleep(level=1))
            self.asleep = True

    def _run(self, llm: LLM, requests: list[Request], sampling: Sampling) -> list[RequestOutput]:
        from vllm import SamplingParams, TokensPrompt

        settings = [
            SamplingParams(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k or 0,
                seed=request.seed,
                max_tokens=sampling.max_len,
                ignore_eos=True,  # of what a config may say; these are the ends of a turn:
                stop_token_ids=self.loaded.stop_ids,
                logprobs=0,  # of the sampled token alone
                flat_logprobs=True,
                detokenize=False,
            )
            for request in requests
        ]
        first = os.environ.get("RANK", "0") == "0"
        outputs: list[Any] = self._ask(
            "generate",
            lambda: llm.generate(
                [TokensPrompt(prompt_token_ids=request.prompt_ids) for request in requests],
                settings,
                use_tqdm=first and sys.stderr.isatty() and len(requests) > self.max_rows,
                lora_request=self.adapter.request() if self.adapter and self.num_syncs else None,
            ),
        )
        if len(outputs) != len(requests):
            raise self._dead(EngineFailure(f"rollout=vllm: {len(requests)} requests were made and {len(outputs)} answered."))
        return outputs

    def _response(self, output: RequestOutput, sampling: Sampling) -> Response:
        (completion,) = output.outputs
        if completion.finish_reason not in REASONS:
            raise self._dead(
                EngineFailure(
                    f"rollout=vllm: a request of {len(output.prompt_token_ids or ())} prompt tokens ended as "
                    f"{completion.finish_reason!r} after {len(completion.token_ids)} tokens; VLLM_LOGGING_LEVEL=WARNING says more."
                )
            )
        logps = list(completion.logprobs.logprobs)  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]  # flat
        assert len(logps) == len(completion.token_ids)
        for place, logp in enumerate(logps):
            if not math.isfinite(logp):
                raise diverged(f"the logits of weights version {self.weights_version} are not finite at response token {place}")
        raw, processed = logps, logps
        if sampling.temperature == 0:
            processed = [0.0] * len(logps)
        elif (sampling.temperature, sampling.top_p, sampling.top_k) != (1, 1, None):
            unknown = [nan] * len(logps)
            raw, processed = (unknown, logps) if self.processed else (logps, unknown)
        return Response(
            token_ids=list(completion.token_ids),
            logps=list(raw),
            processed_logps=list(processed),
            finish_reason=REASONS[completion.finish_reason],
            weights_version=self.weights_version,
        )

    def sync(self, *, weights_version: int) -> dict[str, float]:
        """Sends the trainer's weights, then proves that they are there.

        Raises:
            EngineFailure: the digest or the probe says that they are not, or the engine refused them.
            FloatingPointError: they are not finite.
        """
        llm = self._awake()
        self.weights_version = weights_version
        for name, parameter in self.loaded.model.named_parameters():
            if parameter.requires_grad and not parameter.isfinite().all():
                raise diverged(f"{name} of weights version {weights_version} is not finite")
        share = self._transfer(llm)
        if not self._ask("forget cached prompts", llm.reset_prefix_cache):
            raise self._dead(EngineFailure("rollout=vllm: its prefix cache could not be cleared, and speaks of the old weights."))
        self.num_syncs += 1
        return {"sync/probe_gap": self._probe(), "sync/unread_share": 1 - share}

    def _transfer(self, llm: LLM) -> float:
        """Sends, and holds the digest of what was sent against that of what is there; gives the share that was read back."""
        sent, there = (Digest(repacked=self.repacked, turn=self.num_syncs) for _ in range(2))
        adapter = self.adapter
        if adapter is None:
            outgoing = weights(self.loaded, dtype=self.dtype, merge=True)
            self._ask("take the weights", lambda: send(llm, outgoing, sent))
        else:
            self._ask("load the adapter", lambda: adapter.send(llm, sent))
        if adapter is not None:
            adapter.held(llm, there)
            if self.num_syncs == 0:  # the base is frozen, so once is enough; vLLM read it from the disk by itself
                for weight in weights(self.loaded, dtype=self.dtype, merge=False):
                    sent.add_weight(weight)
        if adapter is None or self.num_syncs == 0:
            held(llm, there)
        # slots of layers that have no adapter are zeros: they count, and add nothing to a sum
        uneven = [kind for kind in sent.counts if kind != "adapter" and sent.counts[kind] != there.counts[kind]]
        if self.num_syncs == 0 and uneven:
            self.readable = False
            self.uneven = ", ".join(f"{there.counts[kind]:,} of {sent.counts[kind]:,} {kind} numbers" for kind in uneven)
        if not self.readable:
            self._require_change(sent, there)
            return 0.0
        wrong = sorted(kind for kind in sent.sums if sent.sums[kind] != there.sums[kind])
        if wrong:
            raise self._dead(
                EngineFailure(
                    f"rollout=vllm: the sampler does not hold the weights of version {self.weights_version} (the digest of "
                    f"{' and '.join(wrong)} weights is {[there.sums[kind] for kind in wrong]}, of those sent "
                    f"{[sent.sums[kind] for kind in wrong]}); its loader does not fit this model: set rollout.sync to the other "
                    "way, or rollout=transformers."
                )
            )
        return sum(sent.counts.values()) / sent.num_sent

    def _require_change(self, sent: Digest, there: Digest) -> None:
        """What cannot be compared must at least change when what is sent does."""
        last_sent, last_there = self.last
        self.last = (sent.sums, there.sums)
        if not self.repacked and last_sent not in (None, sent.sums) and last_there == there.sums:
            raise self._dead(
                EngineFailure(
                    f"rollout=vllm: the sampler's weights did not change when those of version {self.weights_version} were sent; "
                    "set rollout.sync to the other way, or rollout=transformers."
                )
            )

    def _probe(self) -> float:
        """The largest difference, over a few sampled tokens, between the sampler's log-probs and the trainer's own."""
        requests = [Request(prompt_ids=self.probe_ids, seed=seed) for seed in range(PROBE_ROWS)]
        llm = self._awake()
        responses = [self._response(output, PLAIN) for output in self._run(llm, requests, PLAIN)]
        theirs_T = torch.tensor([logp for response in responses for logp in response.logps], dtype=torch.float64)
        ours_T = trainer_logps(self.loaded, self.probe_ids, [response.token_ids for response in responses])
        if not ours_T.isfinite().all():
            raise diverged(f"the trainer's logits of weights version {self.weights_version} are not finite")
        gap = float((ours_T - theirs_T).abs().max())
        if gap > self.max_gap:
            raise self._dead(
                EngineFailure(
                    f"rollout=vllm: sampler and trainer differ by {gap:.3g} in a token's log-prob at weights version "
                    f"{self.weights_version}, above rollout.max_gap={self.max_gap}. Either stale or wrongly loaded weights (the "
                    "gap grows with training: set rollout.sync to the other way), or another precision (it is there at version "
                    "0: set rollout.dtype to the trainer's, or raise rollout.max_gap)."
                )
            )
        return gap

    def _awake(self) -> LLM:
        if self.llm is None or not self.alive:
            raise EngineFailure("rollout=vllm: the engine has ended, and cannot be asked any more.")
        if self.asleep:
            self._ask("wake up", self.llm.wake_up)
            self.asleep = False
        return self.llm

    def _ask(self, what: str, call: Any) -> Any:
        """A call of the engine. One that fails is its end: what state it is in nobody knows.

        Raises:
            EngineFailure: with the error's first line and what helps.
        """
        try:
            with torch.no_grad(), as_it_was():
                return call()
        except Exception as error:  # whatever a foreign library raises
            raise self._dead(failure(f"vLLM could not {what} at weights version {self.weights_version}", error)) from error

    def _dead(self, error: EngineFailure) -> EngineFailure:
        self.alive = False
        return error

    def close(self) -> None:
        """Ends the engine. Of several ranks each keeps the groups that connect it to the others."""
        if self.llm is not None and self.alone and torch.distributed.is_initialized():
            client: Any = self.llm.llm_engine.engine_core
            client.engine_core.shutdown()
        self.llm = None


def trainer_logps(loaded: LoadedModel, prompt_ids: list[int], responses: list[list[int]]) -> torch.Tensor:
    """The trainer's raw log-probs of responses to one prompt, all tokens one after another, float64 `[T]`."""
    side = sequences([prompt_ids] * len(responses), responses, loaded.device)
    ids_T = torch.tensor([token for tokens in responses for token in tokens], device=loaded.device)
    with evaluating(loaded.model):
        logits_TV = project(hidden_at(loaded.body, side), loaded.head_VH)
        return logits_TV.log_softmax(-1).gather(-1, ids_T[:, None])[:, 0].double().cpu()
