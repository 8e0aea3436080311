//! What `tokenrouter bench --help` says besides the flags: examples, and what is measured.

pub const AFTER_HELP: &str = "\
Examples:
  tokenrouter bench config/demo.toml --route rstitch --requests 1,4 --output-len 64 --input-len 32
  tokenrouter bench config/bench-r2r.toml --route r2r-like --requests 1,2,4,8,16 \\
      --output-len 2048 --json out.json --timeline out.trace.json --timeline-svg out.svg
  tokenrouter bench --url http://127.0.0.1:30000 --model rstitch --rate 2,4,8 --total 100 \\
      --input-len 128:32 --output-len 64 --vocab-size 2048 --goodput ttft:200 tpot:50 --plot out.svg
  tokenrouter bench config/demo.toml --route large --requests 8 --dataset turns.jsonl --csv out.csv
  tokenrouter bench config/demo.toml --route large --requests 1 --total 6 --prefix-len 1024 --prefixes 2 \
      --input-len 32 --output-len 4
  tokenrouter bench config/demo.toml --route rstitch --ablation --requests 4 --output-len 512 --max-seconds 20
  tokenrouter bench config/demo.toml --route random --sweep large --requests 4,8 --output-len 256 --plot out.svg
  tokenrouter bench --compare a.toml standard-serving:a.toml --route random --requests 1,8 --output-len 256
  tokenrouter bench --steps
  tokenrouter bench --steps --shape qwen3-32b --rows 1,8 --context-len 1024,8192 --extend 4
  tokenrouter bench --steps --shape qwen3-0.6b --rows 1 --prefill 8192 --json out.json
  tokenrouter bench --kernels --shape qwen3-8b --rows 8,2048

The models of a configuration run in this process, without HTTP and text. A server is asked through
/v1/completions (random prompts as token ids), or /v1/chat/completions where the data set has messages, with
streams. Both are asked for greedy answers that end tokens do not end.

A closed load (--requests N) always has N requests under way until T have ended. An open load (--rate R)
begins them when they arrive, at R a second: gaps are drawn from a gamma distribution of shape B and scaled
so that the last of T comes at T / R. With --max-concurrency a request waits until another has ended.

A data set has an object a line: `prompt` (text, or a list of token ids), `messages`, or `prompt_len` for so
many random tokens; `output_len` goes before --output-len. Lines with the same `session` are turns that go
one after the other, each with the answers before it. It is begun anew where it is shorter than T.

--compare and --ablation load every variant's requests in turns, each run in an engine of its own, and give medians over
the rounds, and ratios to the first variant in the same round: median, and from the least to the most. Weights
are kept where the models are the same. In standard serving each model is a server of its own in this process, with
HTTP between it and the dispatcher, which runs the route's policies outside and makes one call for each token with
the whole sequence (keep-alive, all requests concurrent). Policies that need more than scalar signals, or verify
drafts, are refused. Where the configuration has no min_batch above 1, the last row of --ablation has thresholds that
are tuned from what the row before it measured.

--sweep measures each threshold of a model from 1 to N, the others' at 1: in each round all of them with the same
requests, up and down in turns, N requests in all. Compared are tokens/s without prefills and tail (decode) with
the exact chain of what was measured: step times by batch size and the median gap behind them, how many times
longer steps take beside others, routes and tokens. It gives the threshold that the chain would choose, the one
that was fastest, what the choice loses, and how far the rounds of one threshold are apart: less than that is chance.

What is measured, for each load, of the requests that did not fail (a failure makes the exit status 1); one that
--max-seconds broke off counts as far as it came:
  requests/s, tokens/s, all/s
            requests, tokens of answers, and these with those of prompts, by the time from the start
            of the load to the end of the last request
  decode    of a closed load, tokens/s without prefills and tail: from the moment when each of the
            first N requests has a token until the first of them ends
  goodput   requests/s that were within all limits of --goodput
  handoffs  times that a request went from one model to another
  cached    prompt tokens whose K/V a prefix cache had, of all prompt tokens
  TTFT      from the submission to the first token (over HTTP: the first chunk with text). A token comes in
            this process when the step that commits it has ended, over HTTP when the client reads it
            TTFT cold, TTFT warm: of prompts of which the prefix cache had less than half, and of the others
  TPOT      from a request's first token to its end, by the tokens after the first
  ITL       between tokens that follow each other; over HTTP between chunks
  E2E       from the submission to the end
  late      of an open load: from the moment when a request was due to its submission
and in this process:
  queue     from the submission to the start of the step that samples the first token; the parts of
            a long prompt before the last one are within it
  hand-off  from the end of the step after which another model goes on to the start of that model's
Times have the mean and percentiles, linear between neighbours as numpy's. For each model:
  tokens    share of all tokens that it wrote
  steps     forwards; batch and rows are the requests and the rows of one, on average
  fill      requests of all forwards, by those under way when each began
  step      time of a forward as its thread sees it, the device's work and the wait for it:
            median and 99th percentile
  busy      share of the time in which a forward was under way
  gap       host time between steps: from the end of a forward to the start of the next, median
            and 90th percentile. Waits for work are left out: gaps of 1 ms and more, and those
            in which something came in, as another model's step ended or a request was
            submitted in them or in the 100 µs before
--json has all of it, by our names and by those of vLLM's `bench serve`, and in this process also times of
steps by the number of requests in them (steps_by_batch; alone: while no other model computed), counts
of steps of model i after which model j went on (transitions), and the tokens that these committed (commits).

--steps and --kernels need a CUDA device and no files: weights and K/V are random. The bandwidth
of a copy (bytes read and written) and of reading is measured first. --steps times for each shape, context and R:
  each      rows of each sequence: 1 for decoding, K with --extend
  step      graph of a whole step, sampling and signals included, by the device's clock: median
  forward   the same with upload, download and the host's work, by the host's clock: median
  floor     time to read weights and K/V once at the bandwidth of a copy, and its share of step
  to C      step by the same step at the first context plus the time of the K/V read more
  to 1      step by that with as many rows of a sequence each
With --prefill: the whole prompt by the host's clock, then its linear layers and its attention
alone by the device's clock. --kernels times each kernel of a decoder: replays of graphs that
launch it once in each of up to 28 layers, so that what it reads comes from memory; GB/s are of
the bytes that it must read and write, each once";
