"""How often a seeded answer is another one in other company: the demo on a CPU in float32, with eight adapters.

Each round asks 60 requests of 200 to 420 tokens, all at once and then, in another order, few at a time. It counts
the answers that differ, the draws until then, and by how much log-probabilities differ. From the root:

    python -m manylora_lab.benchmarks.seeded_draws --out draws.json --commit "$(git rev-parse --short HEAD)"
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from manylora import LLM, SamplingParams
from manylora.outputs import CompletionOutput
from manylora_lab.bench.provenance import ROOT
from manylora_lab.benchmarks.run_report import Row, RunReport, run_parser

NUM_REQUESTS = 60
FEW = 12
SEED = 7
Request = tuple[list[int], SamplingParams, str | None]


def asked(rng: random.Random, temperature: float, names: Sequence[str], longest: int) -> list[Request]:
    """One round's requests: half as many tokens as ``longest``, or more, after up to 60."""
    requests: list[Request] = []
    for _ in range(NUM_REQUESTS):
        prompt = [rng.randrange(10, 4000) for _ in range(rng.randint(5, 60))]
        params = SamplingParams(
            temperature=temperature, seed=rng.randrange(2**40), max_tokens=rng.randint(longest // 2 - 10, longest),
            ignore_eos=True, logprobs=0,
        )  # fmt: skip
        requests.append((prompt, params, rng.choice((None, *names))))
    return requests


def answers(llm: LLM, requests: Sequence[Request]) -> list[CompletionOutput]:
    """Of requests that are asked at once."""
    prompts, params, adapters = map(list, zip(*requests, strict=True))
    return [found.outputs[0] for found in llm.generate(prompts, params, adapters)]


def compared(ones: Sequence[CompletionOutput], others: Sequence[CompletionOutput]) -> Row:
    """Of two lists of answers to the same requests."""
    differ = draws = 0
    gaps: list[float] = []
    for one, other in zip(ones, others, strict=True):
        pairs = list(zip(one.token_ids, other.token_ids, strict=True))
        parting = next((place for place, (a, b) in enumerate(pairs) if a != b), None)
        differ += parting is not None
        draws += len(pairs) if parting is None else parting + 1
        gaps += [
            first[token].logprob - second[token].logprob
            for (token, _), first, second in zip(pairs[:parting], one.logprobs or (), other.logprobs or ())
        ]
    off = np.abs(gaps) * 1e6
    rms = float(np.sqrt(np.square(off).mean()))
    counts = {"answers": len(ones), "draws": draws, "differ": differ}
    return {**counts, "off_rms_e6": rms, "off_most_e6": float(off.max())}


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = run_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="of each temperature")
    args = parser.parse_args(arguments)
    report = RunReport(args, SEED, "CPU")
    rng = random.Random(SEED)
    adapters = {folder.name: str(folder) for folder in sorted((ROOT / "demo" / "adapters").iterdir())[:8]}
    longest = 40 if args.toy else 420
    settings: dict[str, Any] = {"device_pool": "96MiB", "host_pool": "16MiB", "max_num_seqs": NUM_REQUESTS}
    with LLM(str(ROOT / "demo" / "model"), adapters, device="cpu", dtype="float32", **settings) as llm:
        for number in range(args.rounds):
            for temperature in (0.8, 1.0):
                requests = asked(rng, temperature, list(adapters), longest)
                together = answers(llm, requests)
                order = rng.sample(range(NUM_REQUESTS), NUM_REQUESTS)
                apart: dict[int, CompletionOutput] = {}
                for begin in range(0, NUM_REQUESTS, FEW):
                    some = order[begin : begin + FEW]
                    apart.update(zip(some, answers(llm, [requests[place] for place in some])))
                found = compared(together, [apart[place] for place in range(NUM_REQUESTS)])
                report.note("rounds", {"round": number, "temperature": temperature, **found})


if __name__ == "__main__":
    main()
