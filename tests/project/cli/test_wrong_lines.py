"""Tests that wrong command lines, options and inputs fail, and name what is wrong.

Each row is a command line and the words of its error that have the reason. `W` stands for a
small workload. Commands run in a folder with a trace, requests, measured steps and the file of
a sweep.
"""

import gzip
import shlex

import pytest
from helpers.commands import run_here

WORKLOAD = "zipf:requests=20"

REQUEST = '{"event":"REQUEST","id":1,"t":0,"prompt":20,"output":1,"keys":[1,2],"key_tokens":16}'

ROW = '{"timestamp":0,"input_length":512,"output_length":1,"hash_ids":[1]}'

STEPS = "prefill_tokens,decode_sequences,context_tokens,seconds\n"

CONTENTS = {
    "ROW": ROW,
    "REQUEST": REQUEST,
    "STEPS": STEPS,
    "AZURE": "TIMESTAMP,ContextTokens,GeneratedTokens",
}
"""Names of what the files in `INPUTS` have."""

GRID = "workload = 'zipf:requests=5'\n"

LINES = r"""
# verbs and options that there are not
simulat | 'simulat' (did you mean 'simulate'?)
frobnicate | there is no verb 'frobnicate'
--verson | '--verson' (did you mean '--version'?)
help demo cash | kvcore demo has no 'cash'
demo cahce | No such command 'cahce'. Did you mean 'cache'?; try `kvcore demo --help`
simulate --evictoin lru | '--evictoin' (did you mean '--eviction'?)
simulate --gpu-memory-utilization 0.9 | what comes nearest is --memory
simulate --mem-fraction-static 0.8 | what comes nearest is --memory
simulate --enable-prefix-caching | what comes nearest is --prefix
simulate --tp 2 | has no option '--tp'; what comes nearest is --tensor-parallel
simulate --max-num-batched-tokens 4096 | what comes nearest is --max-tokens
simulate --no-enable-prefix-caching | what comes nearest is --prefix none
simulate --frobnicate 1 | simulate has no option '--frobnicate'; try
simulate --csv x.csv | `kvcore compare`, `kvcore validate` have it
simulate --jobs 2 | simulate has no option '--jobs'
compare --scheduler srpt | compare has no option '--scheduler'
curve --memory 1GiB | curve has no option '--memory'
size llama-3-8b --model x | size has no option '--model'
replay good.jsonl --tokens 3 | replay has no option '--tokens'
record --zmq tcp://h:1 -o x.jsonl --limit 3 | record has no option '--limit'
sweep grid.toml --blocks 3 | sweep has no option '--blocks'
plugins --kind eviction | plugins has no option '--kind': KIND is an argument, without a flag
plugins evictions | 'evictions' (did you mean 'eviction'?) is not one of 'eviction', 'prefix',
new evictions mine | 'evictions' (did you mean 'eviction'?) is not one of
explain good.jsonl --request 3 | '--request': REQUEST is an argument, without a flag; try
calibrate steps.csv --limit 3 | calibrate has no option '--limit'
export good.jsonl --out x --as vllm | export has no option '--as'
explain good.jsonl --model x | explain has no option '--model'
demo cache --tokens 3 | demo cache has no option '--tokens'
-x | kvcore has no option '-x'
quality --limit 3 | quality has no option '--limit'
# words too many or too few
simulate W W | unexpected extra argument
size | Missing argument 'MODEL'
replay | Missing argument 'FILE'
replay good.jsonl good.jsonl | unexpected extra argument
explain | say what to explain: a REQUEST
explain good.jsonl | say what to explain: a REQUEST, such as `kvcore
explain good.jsonl 0 --summary | or --summary, not both
export good.jsonl | Missing option '--to'. Choose from: vllm, dynamo, mooncake, perfetto; try
export good.jsonl --to vllm | give --out FILE, or with
export good.jsonl --to nothing --out x | '--to': 'nothing' is not one of 'vllm', 'dynamo'
export good.jsonl --to mooncake --zmq tcp://h:1 | give --out FILE, or with --to vllm --zmq
record --zmq tcp://h:1 | Missing option '-o' / '--out'
record -o x.jsonl | Missing option '--zmq'
calibrate | give either 'STEPS', to fit a model
simulate --seed | '--seed' requires an argument
simulate --json=1 | '--json' does not take a value
# numbers
simulate W --blocks many | '--blocks': expected a whole number
simulate W --blocks 0 | --blocks: a pool of 0 blocks was asked for
simulate W --blocks -1 | --blocks: a pool of -1 blocks was asked for
simulate W --blocks 99999999999999999999999 | '--blocks': 99999999999999999999999
simulate W --block-size 0 | block size 0 and key size 16 must be whole numbers
simulate W --block-size -16 | block size -16 and key size 16 must be whole numbers
simulate W --block-size 7 | one must divide the other
simulate W --max-tokens 0 | max_tokens=0 and max_seqs=256: a step has a token
simulate W --max-seqs 0 | max_seqs=0: a step has a token for each sequence
simulate W --max-seqs -5 | max_seqs=-5: a step has a token for each sequence
simulate W --tensor-parallel 3 | 8 K/V heads cannot be divided among 3 devices
simulate W --model phi-4 --tensor-parallel 8 --blocks 99 | give 1, 2, 5, 10, 20 or 40
simulate W --latency roofline:tensor_parallel=3 | give 1, 2, 4, 8, 16 or 32
simulate W --model deepseek-v3 --tensor-parallel 8 | It fits on 8 x h100-nvl, 8 x h20, 8 x h200
size phi-4 --device h100 --tensor-parallel 4 | give 1, 2, 5, 10, 20 or 40
run --tensor-parallel 3 | cannot be divided among 3 devices; give 1, 2 or 4
simulate W --device memory=141GB,flops=989T | there is no bandwidth; give such as memory=141GB
simulate W --tensor-parallel 99999999 | --tensor-parallel: llama-3.1-8b on 99999999 x h100
simulate W --watermark 2 | --watermark: watermark=2.0: give a share of blocks
simulate W --watermark -0.1 | --watermark: watermark=-0.1: give a share of blocks
simulate W --watermark nan | --watermark: watermark=nan: give a share of blocks
simulate W --watermark much | '--watermark': 'much' is not a valid float
simulate W --rate-scale 0 | --rate-scale: rate_scale=0.0: give how many times
simulate W --rate-scale -1 | --rate-scale: rate_scale=-1.0: give how many times
simulate W --rate-scale inf | --rate-scale: rate_scale=inf: give how many times
simulate W --rate-scale nan | --rate-scale: rate_scale=nan: give how many times
simulate W --limit x | '--limit': expected a whole number
simulate W --limit -3 | '--limit': -3 is out of range
simulate W --window 5 | '--window': window '5': expected START:END in seconds
simulate W --window 9:5 | window '9:5': nothing lies in it
simulate W --window a:b | '--window': time 'a': expected a number of seconds
simulate W --window 100000: | window 100000:: no request of zipf arrives in it
compare W --window 100000: | window 100000:: no request of zipf arrives in it
simulate W --memory 5 | '--memory': size '5': expected a number
simulate W --memory 1,5GiB | decimal mark
simulate W --memory 1B | 1 B is less than a block of fp16, which takes 2 MiB
simulate W --memory 99999999TiB | '--memory': size '99999999TiB': too large
simulate W --blocks 10 --memory 1GiB | --blocks and --memory both say how large
simulate W --slo 5 | '5' is no SLO; write one such as ttft=30,tpot=0.1, or none
simulate W --slo ttft=0 | ttft=0: expected a time above 0 seconds
simulate W --slo ttft=-1 | '--slo': time '-1': expected a number of seconds
simulate W --slo ttfd=1 | 'ttfd' (did you mean 'ttft'?)
simulate W --slo ttft=1,ttft=2 | option 'ttft' of 'slo' is given twice
simulate W --slo tpot=1e-12 | finer than a nanosecond
simulate W --slo deadline=1e30 | time '1e30': too large
# choices
simulate W --codec fp17 | --codec: no codec plugin is named 'fp17'
simulate W --codec kivi:residual=128 | --codec: kivi: residual=128 with blocks of 16 tokens
simulate W --codec kivi:bits=3 | 'bits' must be in (2, 4)
simulate W --codec kivi:group=0 | 'group' must be >= 1: 0
simulate W --codec int4:keys=head | 'int4' takes token or channel, not 'head'
simulate W --codec fp8-e4m3:factor=0 | 'factor' must be >= 1e-30: 0
simulate W --codec fp8-e5m2:factor=inf | 'factor' must be <= 1e+30: inf
simulate W --codec fp8-e5m2:scale=head,factor=2 | fp8-e5m2: factor=2.0 is for scale=tensor
simulate W --codec fp16,fp32 | names 2 plugins where one is needed
simulate W --model llama-9 | --model: unknown model 'llama-9'
simulate W --model none.json | --model: none.json: cannot be read
simulate W --model . | --model: config.json: cannot be read
simulate W --device h101 | --device: unknown device 'h101'
simulate W --device l4 --model llama-3-70b | It fits on 8 x l4, 4 x l40s, 4 x a100-40g
simulate W --config none.toml | none.toml: cannot be read: No such file
simulate W --out '' | '--out': empty path; name a file
simulate W --model llama-3-70b --tensor-parallel 1 --device h100 | It fits on 2 x h100
compare W --accounting bytes | 'bytes' is not one of 'keys', 'tokens'
simulate W --dtype bf16 | kvcore simulate has no option '--dtype'
size llama-3-8b --codec kivi:group=5 | not fill blocks of 16; give group=1
size llama-3-8b --codec kivi:group=64 | give group=16, or --block-size 64
size llama-3-8b --codec fp16:bits=2 | has no option 'bits'
# plugins
simulate W --eviction '' | '--eviction': '' has an empty name
simulate W --eviction lfu:half_life | 'half_life' in 'lfu:half_life' is no option
simulate W --eviction lfu:half_life= | plugin 'lfu' takes a number or none, not ''
simulate W --eviction lfu:half_life=0 | lfu: half_life=0.0 must be above 0 (inf: no decay)
simulate W --eviction lfu:decay=1.5 | decay=1.5 must be above 0 and at most 1
simulate W --eviction lfu:decay=0.9,half_life=3 | in place of half_life
simulate W --eviction lfu:decay=0.9,unit=s | unit=accesses or unit=touches
simulate W --eviction lfu:half_live=3 | 'half_live' (did you mean 'half_life'?)
simulate W --eviction lfu:half_life=1,half_life=2 | 'half_life' of 'lfu' is given twice
simulate W --eviction lfu:unit=h | plugin 'lfu' takes s or accesses or touches or none, not 'h'
simulate W --eviction optimum | it is no policy but a bound
simulate W --eviction lruk:k=0 | lruk: k=0 must be from 1 to 1,000
simulate W --eviction lruk:k=99999999999999999999 | plugin 'lruk' takes an integer below 2^63
simulate W --eviction lruk:correlated=-1 | lruk: correlated=-1 must be a number of admissions
simulate W --eviction lruk:history=-1 | lruk: history=-1.0 must be a share of the pool
simulate W --eviction s3fifo:small=1 | s3fifo: small=1.0 must be a share of the pool
simulate W --eviction s3fifo:small=nan | plugin 's3fifo' takes a number, not 'nan'
simulate W --eviction s3fifo:promote=4 | s3fifo: promote=4 must be 1 to 3
simulate W --eviction s3fifo:ghost=-1 | s3fifo: ghost=-1.0 must be a share of the pool
simulate W --eviction slru:protected=1.5 | slru: protected=1.5 must be a share of the pool
simulate W --eviction tail-lru:threshold=-1 | tail-lru: threshold=-1.0 must be 0 or more
simulate W --eviction tail-lru:unit=days | plugin 'tail-lru' takes s or tokens, not 'days'
simulate W --eviction tail-lru:turn=-1 | tail-lru: turn=-1 must be a number of tokens, 0 or more
simulate W --eviction tinylfu:window=2 | tinylfu: window=2.0 must be a share, 0 to 1
simulate W --eviction tinylfu:protected=-1 | tinylfu: protected=-1.0 must be a share, 0 to 1
simulate W --eviction tinylfu:period=0 | tinylfu: period=0 must be 1 or more uses
simulate W --eviction ttl:ttl=0 | ttl: ttl=0.0 must be a positive number of seconds
simulate W --eviction ttl:ttl=inf | ttl: ttl=inf must be a positive number of seconds
simulate W --eviction ttl:ttl=nan | option 'ttl' of eviction plugin 'ttl' takes a number
simulate W --eviction random:seed=x | option 'seed' of eviction plugin 'random' takes an integer
simulate W --eviction lookahead:requests=-1 | lookahead: requests=-1 must be 0 or more, or all
simulate W --eviction lookahead:requests=few | plugin 'lookahead' takes an integer or all
simulate W --eviction s3fifo:ghost=1e308 | s3fifo: ghost=1e+308 must be a share of the pool
simulate W --eviction lruk:history=1e308 | history=1e+308
simulate W --retention window:positions=none | 'window' takes text or cache, not 'none'
simulate W --retention snapkv:window=0 | snapkv: window=0, pool=5: give 1 token or more
simulate W --retention snapkv:pool=4 | an odd number of tokens
simulate W --retention snapkv:budget=16 | sinks=0 are more than the budget of 16 tokens: give a
simulate W --retention expected:ahead=1000000000 | 1 or more of each, and at most 1,048,576
simulate W --retention expected:queries=0 | expected: queries=0, ahead=512: give 1 or more of
simulate W --retention h2o:budget=1.5 | h2o: budget=1.5: give 1 token or more, or a share up to
simulate W --retention window:tokens=0 | window: tokens=0 must be 1 or more
simulate W --retention window:sinks=-1 | window: sinks=-1 must be 0 or more
simulate W --scheduler fcfx | (did you mean 'fcfs'?)
simulate W --scheduler priority:ageing=-1 | priority: ageing=-1.0 must be 0 or from 1e-9 seconds
simulate W --scheduler priority:preemptive=maybe | plugin 'priority' takes true or false
simulate W --scheduler priority:ageing=1e-10 | ageing=1e-10 must be 0 or from 1e-9 seconds on
simulate W --scheduler priority:ageing=inf | ageing=inf must be 0 or
simulate W --scheduler lpm:sample=0 | lpm: sample=0 must be at least 1 job
simulate W --scheduler sjf:length=guess | plugin 'sjf' takes true or predicted, not 'guess'
simulate W --scheduler sjf:error=-1 | sjf: error=-1.0 must be from 0, always right, to 10
simulate W --scheduler sjf:error=11 | from 0, always right, to 10
simulate W --scheduler srpt:length=guess | 'srpt' takes true or predicted, not 'guess'
simulate W --scheduler slo:concurrency=0 | slo: concurrency=0 must be at least 1 sequence
simulate W --scheduler sjf:concurrency=0 | sjf: concurrency=0 must be at least 1 sequence
simulate W --scheduler slo:tpot=inf | slo: tpot=inf must be a positive number of seconds
simulate W --scheduler slo:ttft=0 | slo: ttft=0.0 must be a positive number of seconds
simulate W --scheduler slo:tpot=nan | option 'tpot' of scheduler plugin 'slo' takes a number
simulate W --scheduler fair:prefill_weight=0 | fair: prefill_weight=0.0 must be a positive
simulate W --scheduler fair:decode_weight=0 | fair: decode_weight=0.0 must be a positive number
simulate W --scheduler fair:decode_weight=nan | plugin 'fair' takes a number, not 'nan'
simulate W --latency table | --latency: table: give either 'path', a file
simulate W --latency table:path=none.csv | --latency: none.csv: cannot be read
simulate W --latency table:path=good.jsonl | --latency: good.jsonl:1: not CSV in UTF-8
simulate W --latency table:path=x.csv,engine=vllm | give either 'path', a file, or 'engine'
simulate W --latency roofline:compute=0 | roofline: compute=0.0 must be a share
simulate W --latency roofline:compute=2 | roofline: compute=2.0 must be a share
simulate W --latency roofline:bandwidth=-1 | roofline: bandwidth=-1.0 must be a share
simulate W --latency roofline:bandwidth=1e-300 | by latency model 'roofline', to 3.2e+297 s
simulate W --latency roofline:overhead=-1 | roofline: overhead=-1.0 must be a number of seconds
simulate W --latency roofline:overhead=inf | roofline: overhead=inf must be a number of seconds
simulate W --latency roofline:device=abacus | --latency: unknown device 'abacus'; known: a10
simulate W --latency roofline:compute=nan | takes a number, not 'nan'
simulate W --latency roofline:model=lama-3-8b | did you mean llama-3-8b
simulate W --latency roofline:tensor_parallel=0 | roofline: tensor_parallel=0 must be a number
simulate W --latency linear:step=-1 | linear: step=-1.0 must be a number of seconds
simulate W --latency linear:prefill=1e300 | linear: prefill=1e+300 must be a number of seconds
simulate W --latency linear:context=nan | plugin 'linear' takes a number, not 'nan'
simulate W --latency token-rate:prefill=0 | token-rate: prefill=0.0 must be a number of tokens
simulate W --latency token-rate:decode=-1 | token-rate: decode=-1.0 must be a number of tokens
run W --backend torch-cpu:attention=flash | 'torch-cpu' takes triton or sdpa or flashinfer
run W --generator transformer:layers=0 | error: --generator: layers must
run W --generator transformer:mlp=0 | error: --generator: transformer: mlp must
run W --seed -1 | error: --generator: transformer: seed must be 0 to 2^63 - 1, not -1
run W --generator transformer:heads=-1 | --generator: query_heads must be at least 1, not -1
run W --generator transformer:vocab_size=0 | --generator: transformer: vocab_size must be 1
run W --generator transformer:temperature=-1 | --generator: transformer: temperature must be 0
run W --generator transformer:top_k=0 | --generator: transformer: top_k must be 1 or more, not 0
run W --generator induction:head_dim=32 | 58 or more
run W --generator induction:head_dim=63 | must be even
run W --generator induction:vocab_size=1 | vocab_size must be 2
run W --generator induction:seed=-1 | seed 0 to
run W --generator induction:heads=3 | 3 query heads cannot share 2
run W --generator induction:temperature=-1 | temperature
run W --generator huggingface | --generator: generator plugin 'huggingface' needs
# workloads
simulate nowhere.jsonl | 'nowhere.jsonl': there is no such file, and no workload plugin is named
simulate zipff | did you mean 'zipf'?
simulate '' | WORKLOAD: workload '': empty path; name a file
simulate zipf:requests | WORKLOAD: 'requests' in 'zipf:requests' is no option
simulate zipf:requests=-1 | 'requests' must be >= 1: -1
simulate zipf:requests=x | option 'requests' of workload plugin 'zipf' takes an integer
simulate zipf:arrivals=never | 'arrivals' must be in ('poisson', 'bursty', 'uniform')
simulate zipf:rate=0 | 'rate' must be >= 1e-09: 0.0
simulate bench:rate=1e-320 | 'rate' must be >= 1e-09: 1e-320
simulate zipf:rate=nan | option 'rate' of workload plugin 'zipf' takes a number
simulate zipf:skew=nan | takes a number, not 'nan'
simulate zipf:prefix_tokens=10000001 | 'prefix_tokens' must be <= 10000000: 10000001
simulate zipf:suffix_tokens=10000001 | 'suffix_tokens' must be <= 10000000: 10000001
simulate zipf:output_tokens=10000001 | 'output_tokens' must be <= 10000000: 10000001
simulate zipf:prefixes=10000001 | 'prefixes' must be <= 10000000: 10000001
simulate zipf:burst=10000001 | 'burst' must be <= 10000000: 10000001
simulate zipf:branching=10000001 | 'branching' must be <= 10000000: 10000001
simulate zipf:levels=101 | 'levels' must be <= 100: 101
simulate zipf:burst=0 | 'burst' must be >= 1: 0
simulate zipf:prefixes=0 | 'prefixes' must be >= 1: 0
simulate zipf:skew=-1 | 'skew' must be >= 0: -1.0
simulate zipf:prefix_tokens=-1 | 'prefix_tokens' must be >= 0: -1
simulate zipf:suffix_tokens=-1 | 'suffix_tokens' must be >= 0: -1
simulate zipf:output_tokens=-1 | 'output_tokens' must be >= 0: -1
simulate zipf:levels=0 | 'levels' must be >= 1: 0
simulate zipf:branching=0 | 'branching' must be >= 1: 0
simulate zipf:key_tokens=0 | 'key_tokens' must be >= 1: 0
simulate zipf:seed=18446744073709551616 | plugin 'zipf' takes an integer below 2^63
simulate azure:none.csv | none.csv: cannot be read: No such file or directory
simulate azure:path=none.csv,key_tokens=0 | 'key_tokens' must be >= 1: 0
simulate chat:path=x.jsonl,tokens=y | 'tokens' must be in ('words', 'bytes') (got 'y')
simulate chat:path=x.jsonl,think=-1 | 'think' must be >= 0: -1.0
simulate trace:none.jsonl | WORKLOAD: cannot read the trace none.jsonl
simulate weka:path=x.json,stagger=-1 | 'stagger' must be >= 0: -1.0
simulate weka:path=x.json,stagger=1e300 | 'stagger' must be < 1000000000.0: 1e+300
simulate kv-events:none.jsonl | 'lookups=full'
simulate kv-events:path=none.jsonl,lookups=half | WORKLOAD: 'lookups' must be 'full', not 'half'
simulate kv-events:path=none.jsonl,lookups=full,requests=x | and 'requests' exclude one another
simulate kv-events:path=none.jsonl,lookups=full | WORKLOAD: cannot read the recording none.jsonl
# compare, curve, explain
compare W --blocks x | --blocks 'x': expected a whole number
compare W --blocks 0 | a pool of 0 blocks
compare W --blocks 1,000 | 1,000 is a list of 1 and 0: write 1000
compare W --blocks 1,000,3,000 | a list of 1, 0, 3 and 0: write numbers without commas
compare W --blocks 2147483648 | at most 2147483647
compare W --blocks 10 --memory 1GiB | give one of them
compare W --memory 1B | 1 B is less than a block. A block of 16 tokens of llama-3.1-8b
compare W --memory x | size 'x': expected a number
compare W --memory 1GiB,1.0001GiB | 1,073,741,824 and 1,073,849,198 bytes are both 512 blocks
compare W --codec fp32 | --codec says what a token takes of --memory
compare W --eviction '' | '' has an empty name
compare W --eviction lru,optimal | (did you mean 'optimum'?). There are: arc,
compare W --eviction optimum:bypas=1 | (did you mean 'bypass'?). Its options: bypass=false
compare W --eviction optimum:bypass=maybe | takes true or false, not 'maybe'
compare W --eviction optimum --accounting tokens | in `keys` accounting alone
compare W --eviction optimum --prefix none | nothing of prefix cache 'none'
compare W --prefix '' | '' has an empty name
compare W --block-size 7 | block size 7 and the workload's keys of 16 tokens
compare W --trace t.jsonl | in a pool of one size: add `--eviction NAME --blocks N`
compare W --trace x --memory 1GiB | of one size: add `--eviction NAME`
compare W --trace x --eviction lru --blocks 1,2 | sizes given: 2
compare W --trace x --eviction optimum --blocks 9 | there is no trace of it
compare W --trace t --csv t --eviction lru --blocks 9 | --trace and --csv name the same file
curve W --out a.svg --plot ./a.svg | --out and --plot name the same file
compare W --csv no/such.csv | cannot write no/such.csv
compare '' | workload '': empty path
compare mooncake:path= | empty path, or the working directory; name a file
compare W --csv . | cannot write .: it is a directory; name a file in it
compare W --prometheus - --json | --json and --prometheus - both print a document
compare jsonl:mine.jsonl --csv mine.jsonl | cannot write mine.jsonl
compare jsonl:mine.jsonl --trace mine.jsonl --eviction lru --blocks 9 | cannot write mine.jsonl
curve W --sizes 1 | a curve through 1 sizes was asked for; give 2 or more
curve W --sizes 100001 | --sizes 100001: that many points are too many
curve W --sizes 0,1 | numbers without commas, above 0
curve W --codec fp8 | of the K/V of --model: give that too
curve W --out curve | --out curve: a name says what is written
curve W --out curve.gif | end it with .png, .svg, .pdf, .csv, .json
curve W --eviction optimum --accounting tokens | `keys` accounting alone
explain W 3 | zipf:requests=20 is a workload: say how large the pool is
explain W 3 | such as --price openai
explain W 3 --blocks 30 --eviction lru,lfu | policies given: 2
explain W 999 --blocks 30 | request '999' is not in zipf
explain W 3 --blocks 0 | a pool of 0 blocks was asked for
explain W 3 --blocks 30 --eviction optimum | there is no trace of it
explain good.jsonl 99 | request '99' is not in good.jsonl
explain good.jsonl 3 --blocks 30 | is a trace: what it was recorded with is in it, so --block
explain good.jsonl 3 --limit 3 | good.jsonl is a trace: what it was recorded
# run
run W --shrink 0 | zipf shrunk 0 times
run W --shrink 7 | can only be divided by 1, 2, 4
run W --prompt a | both say what is served
run --prompt a --limit 3 | --limit is for a WORKLOAD alone
run --prompt a --shrink 3 | --shrink is for a WORKLOAD alone: leave it out
run W --max-output 3 | --max-output is for --prompt alone
run --prompt '' | WORKLOAD: prompt '' has no tokens: give a text
run --prompt a --threads 0 | error: threads must be 1 to
run W --stop-at-eos | --stop-at-eos needs --clock wall
run W --clock wall --step-times x --trace x | --step-times and --trace name the same file
run W --acceptance x --trace x | --acceptance and --trace name the same file
run W --blocks 3 --memory 1GiB | both say how large the pool is
run W --trace a.jsonl --out b | --trace and --out both write a trace
run W --memory 1B | 1 B is less than a block of fp32, which takes
run W --model llama-3-8b --generator sincos:model=qwen3-8b | 'sincos' has its own; leave it out
run W --model llama-3-8b --generator sincos:heads=0 | query_heads must be at least 1, not 0
# size
size none.json | none.json: cannot be read: No such file or directory
size good.jsonl | good.jsonl: not a JSON file
size llama-3-8b --tokens 1e18 --batch 1e18 | their K/V exceeds 2^63 bytes
size llama-3-8b --reserve 8GiB | --reserve 8GiB: it is kept free on a device; give --device too
size llama-3-8b --device h100 --reserve x | reserve 'x': expected a percentage
size llama-3-8b --device h100 --reserve 100% | reserve '100%': nothing is left
size llama-3-8b --device h100 --reserve 900GiB | reserve '900GiB': h100 has 74.5 GiB in all
size llama-3-8b --device h100 --reserve -5% | reserve '-5%': expected a percentage
size llama-3-8b --device h1000 | did you mean h100
size llama-3-8b --reserve -5% | reserve '-5%': expected a percentage, such as 10%, or a size
size llama-3-8b --device h100 --reserve 1e9% | reserve '1e9%': expected a percentage
size llama-3-8b --device h100 --reserve 250% | reserve '250%': nothing is left
size mixtral-8x7b --device h200 --tokens 1e18 | their K/V exceeds 2^63 bytes; ask for less
size mixtral-8x7b --device h200 --batch 1e18 | their K/V exceeds 2^63 bytes; ask for less
size mixtral-8x7b --device h200 --block-size 1e18 | their K/V exceeds 2^63 bytes; ask for less
size mixtral-8x7b --device h200 --window 1e18 | window must be 1 to 2,147,483,647
# replicas, routers, servers and planners
simulate W --replicas 0 | '--replicas': 0 is out of range: it must be at least 1
simulate W --replicas 1e6 | --replicas: more than 10,000 are too many
simulate W --replicas 2 --fail replica=2,at=1 | --fail: replica=2,at=1: replicas
simulate W --fail replica=0,at=1,for=2 --fail replica=0,at=3 | --fail: replica=0,at=3: the rep
simulate W --replicas 2 --fail replica=1 | --fail: 'replica=1': a failure needs
simulate W --replicas 2 --fail replica=1,until=2 | write replica=3,at=600,for=120
simulate W --router dynamo | --router: one server gets all requests: give --replicas
simulate W --replicas 2 --view all | --view: 'all' is no view; there are:
simulate W --replicas 2 --live | --live shows one server
simulate W --replicas 2 --allocation contiguous | memory is paged here
simulate W --replicas 2 --router session:bound=1 | 'session': bound=1.0 must be above 1
simulate W --replicas 2 --router session:bound=inf | 'session': bound=inf must be above 1
simulate W --replicas 2 --router session:points=0 | and points 1 or more
simulate W --replicas 2 --router prefix-affinity:tolerance=2 | tolerance=2.0: give 0 to 1
simulate W --replicas 2 --router prefix-affinity:bound=0.5 | bound=0.5: give 0, or 1 or more
simulate W --replicas 2 --router prefix-affinity:bound=inf | bound=inf: give 0, or 1 or more
simulate W --replicas 2 --router dynamo:temperature=-1 | temperature=-1.0 must not be negative
simulate W --replicas 2 --router preble:window=0 | 'preble': give a window above 0 s, and
simulate W --replicas 2 --router preble:window=inf | 'preble': give a window above 0 s, and
simulate W --replicas 2 --router preble:imbalance=0.5 | 'preble': give a window above 0 s, and
simulate W --replicas 2 --autoscale thruput | there are: throughput, load
simulate W --replicas 2 --autoscale load:least=0 | least of 1 or more
simulate W --replicas 2 --autoscale load:most=2,least=3 | least <= start <= most
simulate W --replicas 2 --autoscale load:least=3 | --autoscale: planner 'load': least=3 of 2
simulate W --replicas 2 --autoscale load:start=3 | 'load': start=3 of 2 replicas: give as many
simulate W --disaggregate prefill=2,decode=1 --autoscale load:least=3 | 2 replicas, the most of
simulate W --replicas 2 --autoscale throughput:interval=0 | interval above 0
simulate W --replicas 2 --autoscale throughput:interval=1e-10 | interval above 0
simulate W --replicas 2 --autoscale throughput:interval=inf | none of 292 years
simulate W --replicas 2 --autoscale load:start_up=1e10 | none of 292 years
simulate W --replicas 2 --autoscale load:cool_down=-1 | no negative times
simulate W --replicas 2 --autoscale throughput:headroom=0 | headroom=0.0: give a factor above 0
simulate W --replicas 2 --autoscale throughput:headroom=inf | headroom=inf: give a factor above
simulate W --replicas 2 --autoscale load:memory=0 | memory=0: give 1 interval
simulate W --replicas 2 --autoscale throughput:windows=3 | has no option 'windows'
simulate W --replicas 2 --autoscale load,throughput | is no planner
simulate W --disaggregate prefill=1 | such as prefill=4,decode=2
simulate W --disaggregate prefill=1,decode=1 --drafter acceptance | decode without one
simulate W --disaggregate prefill=0,decode=1 | 1 or more
simulate W --disaggregate prefill=1,decode=1,speed=3 | speed
simulate W --disaggregate prefill=1,decode=1,overlap=half | layers or whole
simulate W --disaggregate prefill=1,prefill=2,decode=1 | write one of
simulate W --disaggregate prefill=1,decode=1,bandwidth=0 | bandwidth
simulate W --disaggregate prefill=x,decode=1 | prefill=x
routers W --replicas 1,000 | --replicas '1,000': 1,000 is a list of 1 and 0
routers W --view all | view: 'all' is no view
routers W --blocks 9 --memory 1GiB | --blocks and --memory both say
route | name the servers
route ftp://a | expected one such as http://127.0.0.1:8001
route http://a --view exact | 'exact' is no view; there are: index, events
route http://a --view events:delay=1 | events that servers publish have no options
route http://a --view event | did you mean 'events'
route http://a --trace nowhere/day.jsonl | cannot write the trace nowhere
serve --port 65536 | port 65536 of 127.0.0.1
serve --host 127..0.1 | port 8001 of 127..0.1
serve --port 99999 | port 99999 of 127.0.0.1
serve --kv-replay tcp://127.0.0.1:5558 | --kv-replay sends the events of --kv-events again
serve --simulate --generator sincos | --generator is not for --simulate
serve --simulate --dtype fp16 | --dtype is not for --simulate
serve --device h200 | --device is for --simulate alone
serve --simulate --speed-up inf | --speed-up inf: give a number from 1e-6 to 1e6
serve --simulate --speed-up nan | --speed-up nan: give a number from 1e-6 to 1e6
serve --simulate --speed-up 0 | --speed-up 0.0: give a number from 1e-6 to 1e6
serve --speed-up 2 | --speed-up is for --simulate alone
serve --simulate --model llama-9 | --model: unknown model 'llama-9'
serve --simulate --model gpt-oss-20b --kv-events tcp://127.0.0.1:1 | layers of gpt-oss-20b keep
serve --simulate --model llama-3-70b --tensor-parallel 1 | tensor-parallel
route http://a --port 99999 | port 99999 of 127.0.0.1: bind(): port must be
# drafters, planes, prices, plans, benchmarks
simulate W --drafter prompt-lookup | a simulation has none
simulate W --drafter acceptance --retention window | rolled back
simulate W --drafter acceptance --allocation contiguous | one token
simulate W --drafter acceptance:file=a.jsonl | cannot be read
run W --drafter medusa:ridge=inf | 'ridge' must be < inf
run W --acceptance a.jsonl | give a --drafter, such as prompt-lookup
curve W --exact | --exact is for a plane
curve W --tier host:memory=256MiB --accounting tokens | a plane counts by keys alone
curve W --tier host:memory=256MiB --eviction lfu | add --exact
curve W --tier nothing:memory=1GiB | no tier plugin is named 'nothing'
curve W --tier host:memory=256MiB --tier disk:memory=1TiB | 2 were given, and a plane has one
compare W --price free | 'free' is not known
explain W --summary --price xai --blocks 5 | no --blocks
explain W none --price xai | 'none' is not in zipf
bench cpu --only sing | no operation 'sing'; there are: decode
bench cpu --dtype fp7 | no dtype 'fp7'; there are: fp64
bench cache --dtype bf16 | --dtype bf16: suites cpu and gpu
bench sim --backend torch-cpu | --backend torch-cpu: suites cpu and gpu
# plots and live views
plot none.jsonl --kind hits -o x.png | cannot read the trace none.jsonl
plot . --kind latency -o x.png | is no result that
plot good.jsonl --kind hits -o x.gif | --out x.gif: a name says what is
plot good.jsonl --kind hits -o no/x.png | cannot write no/x.png: No such
view good.jsonl | -o FILE, or --serve
watch none.jsonl | cannot read the trace none.jsonl
watch good.jsonl --speed 0 | must be above 0, such as 10
watch good.jsonl --from soon | '--from': time 'soon'
watch good.jsonl --every 0 | --every 0: give the seconds
simulate W --live --allocation contiguous | --live shows blocks, which --allocation contiguous
# files that are written
simulate W --allocation contiguous --blocks 600 --trace t.jsonl | use allocation='paged'
simulate W --trace - | '--trace': a file is needed, not '-'
simulate W --out good.jsonl | cannot be made a directory: it is a file; name another one
simulate W --prometheus - --json | --json and --prometheus - both print a document
simulate W --trace t.jsonl --prometheus t.jsonl | --trace and --prometheus name the same file
simulate jsonl:mine.jsonl --trace mine.jsonl | the requests come from
simulate W --config - | '--config': a file is needed, not '-'
simulate W --config '' | '--config': empty path; name a file
export good.jsonl --to mooncake --out good.jsonl | cannot write good.jsonl
export none.jsonl --to mooncake --out x | cannot read the trace none.jsonl: No such file
# replay
replay '' | 'FILE': empty path; name a file
replay . | . is a directory without trace.jsonl.gz: give a trace
replay good.jsonl --at 1 --eviction lfu | whatif has no option '--at'; `kvcore replay`
replay good.jsonl --blocks 0 | a pool of 0 blocks was asked for
replay good.jsonl --steps x | '--steps': 'x' is not one of 'mixed', 'prefill-first'
replay good.jsonl --rate-scale 0 | rate_scale=0.0: give how many times
replay good.jsonl --export good.jsonl | the requests come from
# record, sweep, calibrate, demo
record --zmq nowhere -o x.jsonl | address 'nowhere': expected one such as tcp://
record --zmq tcp://127.0.0.1:1 -o x.jsonl --for 0 | '--for': must be above 0 seconds
record --zmq tcp://127.0.0.1:1 -o x.jsonl --for x | '--for': time 'x': expected a number
record --zmq tcp://127.0.0.1:1 -o x.jsonl --batches 0 | '--batches': 0 is out of range
record --zmq tcp://127.0.0.1:1 -o x.jsonl --ranks 99999 | rank 65535 would have port 65536
record --zmq tcp://127.0.0.1:1 -o x.jsonl --rotate x | '--rotate': size 'x': expected a number
record --zmq tcp://127.0.0.1:1 -o x.jsonl --rotate 5sm | size '5sm': expected
record --zmq tcp://127.0.0.1:1 -o x.jsonl --reconnect 40000 | 'reconnect' must be <= 32767
record --zmq tcp://127.0.0.1:1 -o x.jsonl --ranks 400m | give 400000000 or more
record --zmq tcp://127.0.0.1:1 -o x.jsonl --rotate '1 h' --rotate 90s | '90s' is a second age
record --zmq tcp://127.0.0.1:1 -o x.jsonl --rotate 0s | '--rotate': must be above 0
record --zmq tcp://127.0.0.1:1 -o x.jsonl --rotate '1 GiX' | size '1 GiX': expected
record --zmq tcp://127.0.0.1:1 -o x.jsonl --replay-timeout x | '--replay-timeout': time 'x'
record --zmq tcp://127.0.0.1:1 -o x.jsonl --replay nowhere | address 'nowhere': expected one
record --zmq tcp://127.0.0.1:1 -o no/such/x.jsonl --for 1 | cannot write the recording no/such
record --zmq tcp://127.0.0.1:1 -o . --for 1 | cannot write the recording .: it is a directory
record --zmq tcp://127.0.0.1:1 -o - | '-o' / '--out': a file is needed, not '-'
sweep grid.toml --executor mars | executor 'mars' is not known; there are: local, ray
sweep grid.toml --out x.pdf | out x.pdf: give a directory, or a file that ends
calibrate good.jsonl | good.jsonl:1: not CSV in UTF-8
calibrate steps.csv --latency table | table: give either 'path', a file, or 'engine': vllm
calibrate -o q.csv | give either 'STEPS', to fit a model, or --from aic and -o FILE, to compose
# quality
quality --budget x | --budget x: expected shares of the full bytes, such as 0.1,0.25
quality --budget 0.5,2 | budget 2: give shares of the full bytes
quality --budget 0 | budget 0: give shares
quality --needles 200 | 200 needles in 512 tokens of 1024 token ids
quality --generator sincos:layers=1 | generator 'sincos' has no logits
quality --generator huggingface:model=./nowhere | there is no such folder
quality --plot q.gif | q.gif: a name says what is drawn; end it with one of .png, .svg, .pdf
quality --plot - | '--plot': a file is needed, not '-'
quality --text good.jsonl --texts 99 | 99 texts of 576 tokens need
quality --text nowhere.txt | nowhere.txt: cannot be read: No such file or directory
"""

CONFIGS = r"""
simulate: blocks = | is not TOML: Invalid value (at end of document)
simulate: bloks = 3 | 'bloks' (did you mean 'blocks'?)
simulate: max-tokens = 3\nmax_tokens = 4 | 'max_tokens' is given twice
simulate: blocks = "many" | blocks: expected a whole number
simulate: blocks = 1.5 | blocks: expected a whole number, not 1.5
simulate: null_block = {a = 1} | null_block: expected true or false, not a table
simulate: blocks = 0 | blocks: a pool of 0 blocks was asked for
simulate: blocks = -5 | blocks: a pool of -5 blocks was asked for
simulate: blocks = 99999999999999999999999 | blocks: 99999999999999999999999 is out of range
simulate: blocks = 10\nmemory = "1GiB" | c.toml: blocks and memory
simulate: trace = "a"\nout = "b" | c.toml: trace and out
simulate: memory = 5 | memory: size '5': expected a number
simulate: memory = "1B" | memory: 1 B is less than a block of fp16
simulate: memory = 1979-05-27 | memory: expected a number of bytes, such as
simulate: model = 3 | model: expected text, not 3
simulate: model = "nope" | model: unknown model 'nope'
simulate: device = "nope" | device: unknown device 'nope'
simulate: codec = "fp1" | codec: no codec plugin is named 'fp1'
simulate: codec = 16 | codec: 16 is no plugin
simulate: tensor_parallel = 0 | tensor_parallel: llama-3.1-8b on 0 x h100
simulate: eviction = "" | eviction: '' has an empty name
simulate: eviction = {half_life = 3} | eviction: the table needs a name
simulate: eviction = {name = "lfu", half_live = 3} | 'lfu' has no option 'half_live'
simulate: eviction = {name = "lfu", half_life = "x"} | plugin 'lfu' takes a number or none
simulate: eviction = {name = "lfu", half_life = [1]} | eviction: expected text, a number
simulate: scheduler = {name = "srpt", preemptive = 3} | plugin 'srpt' takes true or false
simulate: latency = {name = "table"} | latency: table: give either 'path', a file, or 'engine'
simulate: latency = {name = "table", path = "none.csv"} | latency: none.csv: cannot be read
simulate: latency = "roofline:compute=3" | roofline: compute=3.0 must be a share
simulate: retention = {name = "window", tokens = 0} | window: tokens=0 must be 1 or more
simulate: workload = 3 | workload: expected a workload: a plugin's name
simulate: workload = "nowhere" | workload: workload 'nowhere': there is no such file
simulate: workload = "" | workload: workload '': empty path; name a file
simulate: workload = {name = "zipf", requests = -1} | 'requests' must be >= 1: -1
simulate: workload = {requests = 3} | workload: the table needs a name
simulate: workload = ["zipf"] | workload: number 1 of the requests is 'zipf'
simulate: workload = "kv-events:none.jsonl" | workload: stored and removed blocks alone cannot
simulate: limit = -1 | limit: -1 is out of range: it must be at least 0
simulate: window = 5 | window: expected a window of time in seconds
simulate: window = "5" | window: window '5': expected START:END in seconds
simulate: window = "9:1" | window '9:1': nothing lies in it
simulate: slo = 5 | slo: expected an SLO such as ttft=30,tpot=0.1, or none
simulate: slo = "5" | slo: '5' is no SLO
simulate: slo = {ttft = 0} | slo: ttft=0: expected a time above 0 seconds
simulate: slo = {ttft = "x"} | slo: time 'x': expected a number of seconds
simulate: [batching]\nmax_tokns = 3 | 'max_tokns' (did you mean 'max_tokens'?)
simulate: batching = 3 | there is no option 'batching'
simulate: chunked = "no" | chunked: expected true or false, not 'no'
simulate: steps = "all" | steps: 'all' is not one of 'mixed', 'prefill-first'
simulate: watermark = "x" | watermark: expected a number, not 'x'
simulate: watermark = 3 | watermark: watermark=3.0: give a share of blocks
simulate: watermark = nan | watermark: watermark=nan: give a share of blocks
simulate: rate_scale = 0 | rate_scale: rate_scale=0.0: give how many times
simulate: rate_scale = inf | rate_scale: rate_scale=inf: give how many times
simulate: block_size = 0 | block_size: workload zipf:requests=20: block size 0
simulate: block_size = 7 | block size 7 and the workload's keys of 16
simulate: trace = "" | trace: empty path; name a file
simulate: as_json = true | there is no option 'as_json' (did you mean 'json'?)
simulate: json = 3 | json: expected true or false, not 3
plan: markdown = "x" | markdown: expected true or false, not 'x'
simulate: fail = "replica=0,at=-1" | c.toml: fail: time '-1'
simulate: max_seqs = 3\n[batching]\nmax-seqs = 3 | 'max_seqs' is given twice
simulate: [[replicas]]\ncount = 0 | c.toml: replicas: 0 is out of range
simulate: [[replicas]]\nblock_size = 32 | c.toml: replicas: there is no option 'block_size'
simulate: [[replicas]]\ndevice = 'h300' | replicas: device: unknown device 'h300'; did you mean
simulate: disaggregate="prefill=1,decode=1"\nreplicas=[{count=2,drafter="acceptance"}] | decode
simulate: [[replicas]]\nblocks = 4\nmemory = '1GiB' | c.toml: replicas: blocks and memory both
simulate: count = "x" | there is no option 'count' (did you mean 'out'?)
run: dtype = "fp1" | dtype: 'fp1' is not one of 'fp64', 'fp32', 'fp16'
run: generator = "nope" | generator: no generator plugin is named 'nope'
run: generator = {name = "transformer", layers = 0} | generator: layers must be at least 1
run: backend = {name = "torch-cpu", attention = 3} | 'torch-cpu' takes triton or sdpa
run: limit = -1 | limit: -1 is out of range: it must be at least 0
run: stop_at_eos = 1 | stop_at_eos: expected true or false, not 1
sweep: blocks = | is not TOML: Invalid value (at end of document)
sweep: bloks = 3 | there is no option 'bloks' (did you mean 'blocks'?)
sweep: blocks = [] | blocks: the list is empty
sweep: blocks = ["x"] | blocks: expected a whole number
sweep: blocks = [[1]] | blocks: expected a whole number, not a list
sweep: blocks = 0 | blocks: a pool of 0 blocks was asked for
sweep: blocks = 10\nmemory = "1GiB" | blocks and memory
sweep: mode = "x" | mode: 'x' is not one of 'simulate', 'compare'
sweep: mode = ["compare", "simulate"] | mode: 2 values were given where one is needed
sweep: mode = "compare" | blocks: a sweep in mode 'compare' needs pools
sweep: mode = "compare"\nblocks = 10\nscheduler = "srpt" | no such thing in mode 'compare'
sweep: mode = "compare"\nblocks = 10\neviction = "optimum"\naccounting = "tokens" | the optimum
sweep: accounting = "keys" | accounting: there is no such thing in mode 'simulate'
sweep: workload = "nowhere" | workload: workload 'nowhere': there is no such file
sweep: workload = ["zipf:requests=5", "zipf:requests=x"] | plugin 'zipf' takes an integer
sweep: eviction = ["lru", "nope"] | eviction: no eviction plugin is named 'nope'
sweep: eviction = "lru,lfu" | eviction: 'lru,lfu' names 2 plugins where one is needed
sweep: device = ["h100", "x"] | device: unknown device 'x'
sweep: model = "x" | model: unknown model 'x'
sweep: memory = ["1GiB", "1"] | memory: size '1': expected a number
sweep: slo = ["x"] | slo: 'x' is no SLO
sweep: limit = [3, -1] | limit: -1 is out of range: it must be at least 0
sweep: window = ["0:5", "5"] | window: window '5': expected START:END in seconds
sweep: executor = 3 | executor: expected text, not 3
sweep: tensor_parallel = [0] | tensor_parallel: llama-3.1-8b on 0 x h100
sweep: watermark = [2] | watermark: watermark=2.0: give a share of blocks
sweep: max_tokens = [0] | max_tokens=0 and max_seqs=256: a step has a token
sweep: latency = "roofline:compute=9" | roofline: compute=9.0 must be a share
sweep: rate_scale = [0] | rate_scale: rate_scale=0.0: give how many times
"""

INPUTS = r"""
compare F |  | F: the file is empty: expected one row a line
compare F | \n\n | F: the file is empty: expected one row a line
compare F | hello | F: no known workload format: its first line begins 'hello'
compare F | [1] | F: no known workload format: its first line begins '[1]'
compare F | { | F: no known workload format: its first line begins '{'
compare F | {"a":1} | F: no known workload format: its first line begins '{"a":1}'
compare F | a,b\n1,2 | F: no known workload format: its first line begins 'a,b'
compare F | \x00\x01\x02 | F: no known workload format: its first line
compare F | BZh91AY | F:1: it is compressed with bzip2, which is not read
compare F | \xfd7zXZ\x00a | F:1: it is compressed with xz, which is not read
compare F | PK\x03\x04aa | F:1: it is a zip archive, which is not read: give plain lines
compare F | \xff\xfea\x00 | F:1: it is UTF-16 text, which is not read: write it as UTF-8
compare F | \xfe\xff\x00a | F:1: it is UTF-16 text, which is not read: write it as UTF-8
compare F | 7z\xbc\xaf'\x1c | F:1: it is a 7z archive, which is not read: give plain lines
compare F | PAR1aa | F:1: it is a Parquet file, which is not read
compare F | \x04"M\x18aa | F:1: it is compressed with lz4, which is not read
compare F | \x1f\x8bgarbage | F:1: the gzip stream is damaged: Error -3 while decompressing
compare F | (\xb5/\xfdxx | F:1: the zstd stream stops early
compare F | ROW with 512 -> "x" | F:1: field 'input_length': expected a whole number
compare F | ROW with 0,"in -> "x","in | F:1: field 'timestamp': expected a number, or a time
compare F --check | REQUEST\nREQUEST | request 1: an earlier request has the same id
simulate F | REQUEST\nREQUEST | request 1: an earlier request has the same id
compare F | REQUEST with "prompt":20 -> "prompt":0 with [1,2] -> [1] | expected at most 0 keys
simulate F | REQUEST with } -> ,"after":7,"session":"s"} | request 7, which is not in the
simulate F | REQUEST with } -> ,"after":7} | request 1 comes after request 7 and has no session
compare mooncake:F | REQUEST | F:1: field 'input_length': expected a whole number
compare jsonl:F | ROW | F:1: field 'event': expected a text, got nothing
compare azure:F | ROW | F:1: expected the header TIMESTAMP,ContextTokens
compare lengths:F | {"a":1,"b":2} | F:1: no column that looks like 'time'; name it by the option
compare trace:F | ROW | F:1: not a kvcore trace: its first line is no HEADER
compare weka:F | ROW | F:1: field 'id': expected a text, got nothing
compare lmcache:F | ROW | F:1: field 'model_name': expected a text, got nothing
compare kv-events:F,lookups=full | ROW | F:1: no recording of KV events: its first line is
compare F | AZURE\n | F: no rows after the header
compare lengths:F | a,b\n1,2 | F:1: no column that looks like 'time'; name it by the option
compare lengths:F,rate=1 | input,output\n1,x | F:2: field 'output': expected
calibrate F |  | F: the file is empty: expected one row a line
calibrate F | STEPS | F: no rows after the header
calibrate F | STEPS1,1,1,-1\n | F:2: seconds: expected seconds, at least 1e-09 and up to
calibrate F | \xff\xfea | F:1: it is UTF-16 text, which is not read: write it as UTF-8
simulate W --latency table:path=F | prefill_tokens,seconds\n | F:1: column 'decode_sequences' is
simulate W --latency table:path=F | STEPS1,1,1,x\n | --latency: F:2: seconds: expected seconds
simulate W --latency table:path=F |  | --latency: F: the file is empty: expected one row a line
size F.json |  | F.json: not a JSON file: Expecting value: line 1 column 1
size F.json | \xff\xfe\x00 | F.json: not a JSON file: 'utf-16-le' codec can't decode
simulate W --model F.json | [] | --model: F.json: expected a JSON object
"""
"""A command line, the content of the file F, and a fragment of its error."""

GZIP = gzip.compress(ROW.encode(), mtime=0)
WIDE = REQUEST.replace("16}", "32}").replace('"id":1', '"id":2')
BYTES = [
    ("compare F", GZIP[:-9], "F:1: the gzip stream stops early"),
    ("compare F", GZIP + b"x", "F:1: the gzip stream stops early"),
    (
        "compare F",
        f"{REQUEST}\n{WIDE}".encode(),
        "F:2: field 'keys': expected at most 1 key (20",
    ),
]


def filled(text):
    """Return the bytes of a content in `INPUTS`, which may have names, escapes and edits."""
    text, *edits = text.split(" with ")
    for name, value in CONTENTS.items():
        text = text.replace(name, value)
    for edit in edits:
        text = text.replace(*edit.split(" -> "), 1)
    return text.encode().decode("unicode_escape").encode("latin-1")


FOREIGN = "F:1: not a kvcore trace: its first line is no HEADER"


def headed(old, new):
    """Return an edit of the first line of a trace."""
    return lambda t: [t[0].replace(old, new), *t[1:]]


TRACES = [
    (lambda t: t[:1], "replay F", "F: incomplete: the file ends after line 1, without END"),
    (lambda t: t[:40], "explain F 99999", "request '99999' is not in F"),
    (lambda t: [t[0][:50]], "replay F", FOREIGN),
    (lambda t: t[1:], "replay F", FOREIGN),
    (lambda t: [t[0], t[2]], "replay F", "F:2: this line has n = 2; 1 lines stand before it"),
    (lambda t: [*t[:5], "{", *t[5:]], "replay F", "F:6: not JSON: unexpected end of data, at"),
    (headed('"schema":2', '"schema":99'), "replay F", "F:1: schema 99; this version of kvcore"),
    (headed(":600", ":-1"), "replay F", "F:1: HEADER field 'blocks' must be an integer from 1"),
    (headed(":600", ':"x"'), "replay F", "F:1: HEADER field 'blocks' must be an integer from"),
    (lambda t: t[:-1], "replay F --eviction lfu", "the file ends after line 227, without"),
    (lambda _: [ROW], "replay F", FOREIGN),
    (lambda _: ["[1]"], "replay F", FOREIGN),
    (lambda _: [], "replay F", "F: incomplete: the file is empty, without END"),
    (lambda _: [ROW], "export F --to vllm --out o", FOREIGN),
    (lambda _: [], "export F --to mooncake --out o", "F: incomplete: the file is empty"),
]
"""An edit of the lines of a trace in F, a command line, and a fragment of its error."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a trace, requests, measured steps and the file of a sweep."""
    path = tmp_path_factory.mktemp("wrong")
    done = run_here("simulate", WORKLOAD, "--blocks", "600", "--trace", "good.jsonl", cwd=path)
    assert done.returncode == 0
    (path / "mine.jsonl").write_text(REQUEST)
    (path / "grid.toml").write_text(f"{GRID}blocks = 100\n")
    (path / "steps.csv").write_text(STEPS)
    return path


def refused(folder, words, code=2, *, partial=False):
    """Run a command line that must fail with exit code `code`, and return its error.

    Stdout must be empty, unless `partial` allows the report of the part that was read.
    """
    done = run_here(*[WORKLOAD if word == "W" else word for word in words], cwd=folder)
    assert done.returncode == code, done.stderr
    assert partial or not done.stdout
    # A notice may stand above it.
    *_, error = done.stderr.partition("kvcore: error: ")
    assert error
    return f"kvcore: error: {error}"


def rows(table):
    """Return the cells of the lines of a table in text."""
    lines = [line for line in table.strip().splitlines() if not line.startswith("#")]
    return [tuple(line.split(" | ")) for line in lines]


@pytest.mark.parametrize(("line", "fragment"), rows(LINES))
def test_wrong_command_lines_have_the_reason(folder, line, fragment):
    """The error for a wrong command line names what is wrong; nothing is printed or written."""
    before = {path: path.read_bytes() for path in folder.iterdir()}
    assert fragment in refused(folder, shlex.split(line))
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize(("config", "fragment"), rows(CONFIGS))
def test_wrong_configuration_files_have_the_reason(folder, config, fragment):
    """The error for a wrong configuration file begins with the file and has the reason."""
    verb, _, text = config.partition(": ")
    text = text.replace("\\n", "\n")
    own = "workload" in text
    (folder / "c.toml").write_text(text if own or verb != "sweep" else GRID + text)
    words = [verb, "c.toml"] if verb == "sweep" else [verb, "--config", "c.toml"]
    error = refused(folder, words if own or verb == "sweep" else [*words, "W"])
    assert error.startswith("kvcore: error: c.toml: ")
    assert error.count("c.toml") == 1
    assert fragment in error


@pytest.mark.parametrize(("line", "content", "fragment"), [*rows(INPUTS), *BYTES])
def test_wrong_inputs_have_the_reason(folder, line, content, fragment):
    """The error for a wrong input has its place and the reason.

    The exit code is 2, or 1 for a file that is read as a trace or a recording.
    """
    name = "F.json" if "F.json" in line else "F"
    (folder / name).write_bytes(filled(content) if isinstance(content, str) else content)
    code = 1 if line.startswith(("compare trace:", "compare kv-events:")) else 2
    assert fragment in refused(folder, line.split(), code)


@pytest.mark.parametrize(("edit", "line", "fragment"), TRACES)
def test_wrong_traces_have_the_reason(folder, edit, line, fragment):
    """The error for a damaged, cut or foreign trace has its place and the reason.

    The exit code is 1, or 2 for a request that is not in a cut trace.
    """
    lines = (folder / "good.jsonl").read_text().splitlines()
    (folder / "F").write_text("".join(f"{each}\n" for each in edit(lines)))
    code = 2 if line.startswith("explain") else 1
    assert fragment in refused(folder, line.split(), code, partial=line == "replay F")
