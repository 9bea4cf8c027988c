"""Tests that wrong command lines, options and inputs fail, and name what is wrong.

Each row is a command line and a fragment of its error. `W` stands for a small workload.
Commands run in a folder with a trace, requests, measured steps and the file of a sweep.
"""

import gzip
import shlex

import pytest
from helpers.commands import run_here

WORKLOAD = "zipf:requests=20"

REQUEST = '{"event":"REQUEST","id":1,"t":0,"prompt":20,"output":1,"keys":[1,2],"key_tokens":16}'

ROW = '{"timestamp":0,"input_length":512,"output_length":1,"hash_ids":[1]}'

STEPS = "prefill_tokens,decode_sequences,context_tokens,seconds\n"

GRID = "workload = 'zipf:requests=5'\n"

LINES = r"""
# verbs and options that there are not
simulat | 'simulat' (did you mean 'simulate'?)
frobnicate | there is no verb 'frobnicate'
--verson | '--verson' (did you mean '--version'?)
help nothing | 'nothing'
help demo cash | 'cash'
demo cash | 'cash'
simulate --evictoin lru | '--evictoin' (did you mean '--eviction'?)
simulate --limt 3 | '--limt' (did you mean '--limit'?)
simulate --csv x.csv | `kvcore compare`, `kvcore validate` have it
simulate --jobs 2 | '--jobs'
compare --scheduler srpt | '--scheduler'
compare --tensor-parallel 2 | '--tensor-parallel'
curve --memory 1GiB | '--memory'
curve --trace t.jsonl | '--trace'
run --csv x | `kvcore compare`, `kvcore validate` have it
size llama-3-8b --model x | '--model'
replay good.jsonl --tokens 3 | '--tokens'
record --zmq tcp://h:1 -o x.jsonl --limit 3 | '--limit'
sweep grid.toml --blocks 3 | '--blocks'
plugins --kind eviction | '--kind'
calibrate steps.csv --limit 3 | '--limit'
export good.jsonl --out x --as vllm | '--as'
explain good.jsonl --model x | '--model'
demo cache --tokens 3 | '--tokens'
-x | '-x'
simulate -z | '-z'
quality --limit 3 | '--limit'
quality --budgets 3 | '--budgets' (did you mean '--budget'?)
# words too many or too few
simulate W W | unexpected extra argument
compare W W | unexpected extra argument
plugins lru | unexpected extra argument
size | 'MODEL'
size llama-3-8b h100 | unexpected extra argument
replay | 'FILE'
replay good.jsonl good.jsonl | unexpected extra argument
explain | 'SOURCE'
explain good.jsonl | say what to explain: a REQUEST, such as `kvcore
explain good.jsonl 0 --summary | or --summary, not both
explain good.jsonl 0 1 | unexpected extra argument
export good.jsonl | '--to'
export | 'TRACE'
export good.jsonl --to vllm | give --out FILE, or with
export good.jsonl --to vllm --out x.jsonl --replay tcp://h:1 | give --out FILE, or with
export good.jsonl --to dynamo --zmq tcp://h:1 | give --out FILE, or with
export good.jsonl --to nothing --out x | 'nothing'
export good.jsonl --to mooncake --zmq tcp://h:1 | --out
export good.jsonl --to vllm --out x.jsonl --zmq tcp://h:1 | give --out FILE, or with
record --zmq tcp://h:1 | '--out'
record -o x.jsonl | '--zmq'
sweep | 'NAME.TOML'
calibrate | 'STEPS'
simulate --seed | '--seed' requires an argument
simulate --limit | '--limit' requires an argument
simulate --json=1 | '--json' does not take a value
# numbers
simulate W --blocks many | 'many'
simulate W --blocks 1.5 | '--blocks'
simulate W --blocks 0 | --blocks
simulate W --blocks -1 | --blocks
simulate W --blocks 1e10 | --blocks
simulate W --blocks 99999999999999999999999 | --blocks
simulate W --block-size 0 | --block-size
simulate W --block-size -16 | --block-size
simulate W --block-size x | '--block-size'
simulate W --block-size 7 | one must divide the other
simulate W --max-tokens 0 | max_tokens
simulate W --max-tokens 99999999999999999999999 | '--max-tokens'
simulate W --max-tokens 8q | '8q'
simulate W --max-seqs 0 | max_seqs
simulate W --max-seqs -5 | max_seqs
simulate W --max-seqs lots | 'lots'
simulate W --tensor-parallel 0 | give 1 to 65,536 devices
simulate W --tensor-parallel 99999999 | --tensor-parallel
simulate W --tensor-parallel two | 'two'
simulate W --watermark 2 | watermark
simulate W --watermark -0.1 | watermark
simulate W --watermark nan | watermark
simulate W --watermark much | 'much'
simulate W --rate-scale 0 | rate_scale
simulate W --rate-scale -1 | rate_scale
simulate W --rate-scale inf | rate_scale
simulate W --rate-scale nan | above 0
simulate W --rate-scale fast | 'fast'
simulate W --seed x | '--seed'
simulate W --seed 1.5 | '--seed'
simulate W --seed 18446744073709551616 | '--seed'
simulate W --limit x | '--limit'
simulate W --limit -3 | '--limit': -3 is out of range
simulate W --window 5 | '--window'
simulate W --window 9:5 | '9:5'
simulate W --window a:b | 'a'
simulate W --window : | ':'
simulate W --window 1:2:3 | '1:2:3'
simulate W --window 100000: | window 100000:
compare W --window 100000: | window 100000:
simulate W --memory 5 | '5'
simulate W --memory 5QB | '5QB'
simulate W --memory 1,5GiB | decimal mark
simulate W --memory 1B | 1 B is less than a block of fp16, which takes 2 MiB
simulate W --memory 99999999TiB | 99999999TiB
simulate W --memory lots | 'lots'
simulate W --blocks 10 --memory 1GiB | --blocks and --memory both say how large
simulate W --slo 5 | '5' is no SLO; write one such as ttft=30,tpot=0.1, or none
simulate W --slo ttft | 'ttft'
simulate W --slo ttft=0 | ttft=0: expected a time above 0 seconds
simulate W --slo ttft=-1 | '-1'
simulate W --slo ttft=soon | 'soon'
simulate W --slo ttfd=1 | 'ttfd' (did you mean 'ttft'?)
simulate W --slo ttft=1,ttft=2 | twice
simulate W --slo tpot=1e-12 | finer than a nanosecond
simulate W --slo deadline=1e30 | too large
# choices
simulate W --steps all | 'all'
simulate W --allocation linked | 'linked'
simulate W --codec fp17 | --codec: no codec plugin is named 'fp17'
simulate W --codec kivi:residual=128 | --codec: kivi: residual=128 with blocks of 16 tokens
simulate W --codec fp16,fp32 | names 2 plugins where one is needed
simulate W --model llama-9 | 'llama-9'
simulate W --model '' | --model
simulate W --model none.json | none.json
simulate W --model . | config.json
simulate W --device h101 | 'h101'
simulate W --device '' | --device
simulate W --device l4 --model llama-3-70b | It fits on 7 x l4, 4 x a40
simulate W --config none.toml | none.toml: cannot be read: No such file
simulate W --out '' | empty path
simulate W --model llama-3-70b --tensor-parallel 1 --device h100 | --tensor-parallel
compare W --accounting bytes | 'bytes' is not one of 'keys', 'tokens'
run --dtype fp1 --prompt a | 'fp1' is not one of
run --clock sun | 'sun'
size llama-3-8b --codec fp1 | no codec plugin is named 'fp1'
size llama-3-8b --codec kivi:group=5 | give group=1
size llama-3-8b --codec kivi:group=64 | give group=16, or --block-size 64
size llama-3-8b --codec fp16:bits=2 | has no option 'bits'
size llama-3-8b --weights-dtype int3 | 'int3'
# plugins
simulate W --eviction lru2 | 'lru2'
simulate W --eviction '' | --eviction
simulate W --eviction , | --eviction
simulate W --eviction lru,lfu | names 2 plugins where one is needed
simulate W --eviction lru:k=3 | 'k'
simulate W --eviction lfu:half_life | 'half_life'
simulate W --eviction lfu:half_life= | half_life
simulate W --eviction lfu:half_life=x | 'half_life'
simulate W --eviction lfu:half_life=-1 | half_life
simulate W --eviction lfu:half_live=3 | 'half_live' (did you mean 'half_life'?)
simulate W --eviction lfu:half_life=1,half_life=2 | twice
simulate W --eviction lfu:unit=h | 'unit'
simulate W --eviction optimum | it is no policy but a bound
simulate W --eviction belady | belady
simulate W --eviction lruk:k=0 | lruk
simulate W --eviction lruk:k=99999999999999999999 | 'k'
simulate W --eviction lruk:correlated=-1 | correlated
simulate W --eviction lruk:history=-1 | history
simulate W --eviction s3fifo:small=2 | small
simulate W --eviction s3fifo:small=nan | 'small'
simulate W --eviction s3fifo:promote=-1 | promote
simulate W --eviction s3fifo:ghost=-1 | ghost
simulate W --eviction slru:protected=1.5 | protected
simulate W --eviction tail-lru:threshold=-1 | threshold
simulate W --eviction tail-lru:unit=days | 'unit'
simulate W --eviction tail-lru:turn=-1 | turn
simulate W --eviction tinylfu:window=2 | window
simulate W --eviction tinylfu:period=0 | period
simulate W --eviction ttl:ttl=0 | ttl
simulate W --eviction ttl:ttl=nan | 'ttl'
simulate W --eviction random:seed=x | 'seed'
simulate W --eviction lookahead:requests=-1 | requests
simulate W --eviction lookahead:requests=few | 'requests'
simulate W --eviction adaptive:experts=lru | experts
simulate W --eviction adaptive:experts=lru+nope | 'nope'
simulate W --eviction adaptive:rate=2 | rate
simulate W --eviction adaptive:discount=-1 | discount
simulate W --eviction lruk:k=2147483648 | k=2147483648
simulate W --eviction adaptive:ghosts=1e308 | ghosts=1e+308
simulate W --eviction s3fifo:ghost=1e308 | ghost=1e+308
simulate W --eviction lruk:history=1e308 | history=1e+308
simulate W --prefix tree | 'tree'
simulate W --prefix radix:depth=3 | 'depth'
simulate W --retention windows | 'windows'
simulate W --retention window:tokens=0 | tokens
simulate W --retention window:sinks=-1 | sinks
simulate W --scheduler fcfx | (did you mean 'fcfs'?)
simulate W --scheduler priority:ageing=-1 | ageing
simulate W --scheduler priority:preemptive=maybe | 'preemptive'
simulate W --scheduler lpm:sample=-1 | sample
simulate W --scheduler sjf:length=guess | 'length'
simulate W --scheduler sjf:error=-1 | error
simulate W --scheduler sjf:concurrency=0 | concurrency
simulate W --scheduler slo:ttft=-1 | ttft
simulate W --scheduler slo:tpot=nan | 'tpot'
simulate W --scheduler fair:prefill_weight=0 | prefill_weight
simulate W --scheduler fair:decode_weight=nan | 'decode_weight'
simulate W --latency quick | 'quick'
simulate W --latency table | 'path'
simulate W --latency table:path=none.csv | none.csv
simulate W --latency table:path= | path
simulate W --latency table:path=good.jsonl | good.jsonl
simulate W --latency table:path=. | .
simulate W --latency roofline:compute=0 | compute
simulate W --latency roofline:compute=2 | compute
simulate W --latency roofline:bandwidth=-1 | bandwidth
simulate W --latency roofline:bandwidth=1e-300 | roofline
simulate W --latency roofline:overhead=-1 | overhead
simulate W --latency roofline:overhead=inf | overhead
simulate W --latency roofline:device=abacus | 'abacus'
simulate W --latency roofline:tensor_parallel=0 | tensor_parallel
simulate W --latency linear:step=-1 | step
simulate W --latency linear:prefill=1e300 | prefill
simulate W --latency linear:context=nan | 'context'
simulate W --latency token-rate:prefill=0 | prefill
simulate W --latency token-rate:decode=-1 | decode
run W --generator gpt | 'gpt'
run W --backend tpu | no backend plugin is named 'tpu'
run W --backend torch-cpu:attention=flash | 'attention'
run W --generator transformer:layers=0 | error: --generator: layers must
run W --generator transformer:mlp=0 | error: --generator: transformer: mlp must
run W --seed -1 | error: --generator: transformer: seed must be 0 to 2^63 - 1, not -1
run W --model no-such-model | unknown model 'no-such-model'
run W --generator transformer:heads=-1 | heads
run W --generator transformer:vocab_size=0 | vocab_size
run W --generator transformer:temperature=-1 | temperature
run W --generator transformer:top_k=0 | top_k
run W --generator huggingface | 'model'
# workloads
simulate nowhere.jsonl | 'nowhere.jsonl': there is no such file, and no workload plugin is named
simulate zipff | did you mean 'zipf'?
simulate '' | WORKLOAD
simulate zipf:request=3 | 'request' (did you mean 'requests'?)
simulate zipf:requests | 'requests'
simulate zipf:requests=-1 | requests
simulate zipf:requests=x | 'requests'
simulate zipf:requests=1.5 | 'requests'
simulate zipf:arrivals=never | arrivals
simulate zipf:rate=0 | rate
simulate zipf:rate=-1 | rate
simulate zipf:rate=nan | 'rate'
simulate zipf:burst=0 | burst
simulate zipf:prefixes=0 | prefixes
simulate zipf:skew=-1 | skew
simulate zipf:prefix_tokens=-1 | prefix_tokens
simulate zipf:suffix_tokens=-1 | suffix_tokens
simulate zipf:output_tokens=-1 | output_tokens
simulate zipf:levels=0 | levels
simulate zipf:branching=0 | branching
simulate zipf:key_tokens=0 | key_tokens
simulate zipf:seed=18446744073709551616 | 'seed'
simulate zipf,lru | zipf
simulate azure | needs a value for option 'path'
simulate azure:none.csv | none.csv
simulate azure:path=none.csv,key_tokens=0 | key_tokens
simulate jsonl | 'path'
simulate jsonl:none.jsonl | none.jsonl
simulate jsonl:path=none.jsonl,x=1 | 'x'
simulate chat | 'path'
simulate chat:path=x.jsonl,tokens=y | tokens
simulate chat:path=x.jsonl,think=-1 | think
simulate mooncake:none.jsonl | none.jsonl
simulate trace | 'path'
simulate trace:none.jsonl | none.jsonl
simulate weka:none.json | none.json
simulate weka:path=x.json,stagger=-1 | stagger
simulate lmcache:none.csv | none.csv
simulate lengths:none.csv | none.csv
simulate kv-events | 'path'
simulate kv-events:none.jsonl | 'lookups=full'
simulate kv-events:path=none.jsonl,lookups=half | lookups
simulate kv-events:path=none.jsonl,lookups=full,requests=x | exclude
simulate kv-events:path=none.jsonl,lookups=full | none.jsonl
simulate . | .
# compare, curve, explain
compare W --blocks x | --blocks
compare W --blocks 0 | a pool of 0 blocks
compare W --blocks 1,000 | 1,000 is a list of 1 and 0: write 1000
compare W --blocks 1,000,3,000 | a list of 1, 0, 3 and 0: write numbers without commas
compare W --blocks 9,,20 | several are a list
compare W --blocks -5 | several are a list, such as 1000,3000
compare W --blocks 10,x | 10,x
compare W --blocks '' | --blocks
compare W --blocks 2147483648 | at most 2147483647
compare W --blocks 10 --memory 1GiB | give one of them
compare W --memory 1B | 1 B is less than a block. A block of 16 tokens of llama-3-8b
compare W --memory x | size 'x'
compare W --codec fp17 --memory 4GiB | no codec plugin is named 'fp17'
compare W --codec fp32 | --codec says what a token takes of --memory
compare W --eviction lruu | no eviction plugin is named 'lruu' (did you mean 'lru'?)
compare W --eviction lru,nope | 'nope'
compare W --eviction '' | '' has an empty name
compare W --eviction optimum:x=1 | Its options: bypass=false
compare W --eviction optimum --accounting tokens | in `keys` accounting alone
compare W --eviction optimum --prefix none | nothing of prefix cache 'none'
compare W --prefix nope | 'nope'
compare W --prefix '' | '' has an empty name
plan W --eviction '' | write NAME or NAME:option=value,...; try `kvcore plan --help`
compare W --block-size 0 | block
compare W --block-size 7 | block size 7 and the workload's keys of 16 tokens
compare W --seed x | '--seed'
compare W --memory 1GiB --model gpt-9 | unknown model 'gpt-9'
compare W --trace t.jsonl | in a pool of one size: add `--eviction NAME --blocks N`
compare W --trace x --memory 1GiB | of one size: add `--eviction NAME`
compare W --trace x --eviction lru --blocks 1,2 | sizes given: 2
compare W --trace x --eviction optimum --blocks 9 | there is no trace of it
compare W --trace t.jsonl --eviction lru | in a pool of one size: add `--blocks N`
compare W --trace t --csv t --eviction lru --blocks 9 | --trace and --csv name the same file
curve W --out a.svg --plot ./a.svg | --out and --plot name the same file
compare W --csv no/such.csv | cannot write no/such.csv
compare W --csv '' | Invalid value for '--csv': empty path; name a file
compare W --trace '' | Invalid value for '--trace': empty path; name a file
compare '' | workload '': empty path
compare mooncake:path= | empty path, or the working directory; name a file
compare W --csv . | .
compare W --prometheus - --json | --prometheus
compare jsonl:mine.jsonl --csv mine.jsonl | mine.jsonl
compare jsonl:mine.jsonl --trace mine.jsonl --eviction lru --blocks 9 | mine.jsonl
curve W --sizes x | expected a number of sizes
curve W --sizes 1 | a curve through 1 sizes was asked for; give 2 or more
curve W --sizes 100001 | too many
curve W --sizes 0,1 | numbers without commas, above 0
curve W --sizes '' | --sizes
curve W --codec fp8 | give that too
curve W --jobs 0 | 0 is out of range: it must be at least 1
curve W --jobs x | '--jobs'
curve W --out curve | --out
curve W --out curve.pdf | end it with .png, .svg, .csv, .json
curve W --out no/curve.csv | cannot write no/curve.csv
curve W --eviction lrux | did you mean 'lru'?
curve W --eviction '' | has an empty name
curve W --eviction optimum --accounting tokens | `keys` accounting alone
curve W --model no-model | no-model
curve nowhere | 'nowhere'
explain none.jsonl 3 | none.jsonl
explain W 3 | zipf:requests=20 is a workload: say how large the pool is
explain W 3 | such as --price openai
explain zpif 3 | there is no such file, and no workload plugin is named 'zpif'
explain W 3 --blocks 30 --eviction lru,lfu | policies given: 2
explain W 999 --blocks 30 | request '999' is not in zipf
explain W 3 --blocks 0 | a pool of 0 blocks was asked for
explain W 3 --blocks x | '--blocks'
explain W 3 --blocks 30 --eviction nope | 'nope'
explain W 3 --blocks 30 --eviction optimum | there is no trace of it
explain good.jsonl 99 | '99'
explain good.jsonl 3 --blocks 30 | is a trace: what it was recorded with is in it, so --block
explain good.jsonl 3 --limit 3 | --limit
explain good.jsonl --summary --top 0 | Invalid value for '--top'
explain good.jsonl --summary --top x | '--top'
# run
run W --limit -1 | '--limit': -1 is out of range
run W --shrink 0 | shrunk 0
run W --shrink 7 | can only be divided by 1, 2, 4
run W --shrink x | '--shrink'
run W --prompt a | both say what is served
run --prompt a --limit 3 | --limit is for a WORKLOAD alone
run --prompt a --shrink 3 | --shrink
run W --max-output 3 | --max-output is for --prompt alone
run --prompt a --max-output -1 | '--max-output': -1 is out of range: it must be at least 0
run --prompt '' | prompt ''
run --prompt a --threads 0 | error: threads must be 1 to
run --prompt a --threads x | '--threads'
run W --stop-at-eos | --stop-at-eos needs --clock wall
run W --step-times x.csv | --step-times needs --clock wall
run W --clock wall --step-times x --trace x | --step-times and --trace name the same file
run W --acceptance x --trace x | --acceptance and --trace name the same file
run W --blocks 3 --memory 1GiB | both say how large the pool is
run --prompt ' ' | has no tokens
run W --trace a.jsonl --out b | --trace and --out both write a trace
run W --memory 1B | 1 B is less than a block of fp32, which takes
run W --blocks 0 | --blocks
run W --model llama-3-8b --generator sincos:heads=0 | heads
# size
size nope | 'nope'
size '' | ''
size none.json | none.json
size good.jsonl | good.jsonl
size . | config.json
size llama-3-8b --device nope | 'nope'
size llama-3-8b --tokens 0 | '--tokens'
size llama-3-8b --tokens 8q | '8q'
size llama-3-8b --tokens 1e40 | '--tokens'
size llama-3-8b --batch 0 | '--batch'
size llama-3-8b --batch 0.5 | '--batch'
size llama-3-8b --tokens 1e18 --batch 1e18 | --tokens
size llama-3-8b --block-size 0 | '--block-size'
size llama-3-8b --window 0 | '--window': 0 is out of range
size llama-3-8b --reserve 8GiB | --reserve 8GiB: it is kept free on a device; give --device too
size llama-3-8b --device h100 --reserve x | 'x'
size llama-3-8b --device h100 --reserve 100% | '100%'
size llama-3-8b --device h100 --reserve 900GiB | '900GiB'
size llama-3-8b --device h100 --reserve -5% | '-5%'
# files that are written
simulate W --trace - | '--trace'
simulate W --trace '' | '--trace'
simulate W --trace . | directory
simulate W --trace no/such/t.jsonl | no/such
simulate W --out - | '--out'
simulate W --out good.jsonl | good.jsonl
simulate W --prometheus - --json | --prometheus
simulate W --prometheus no/such.prom | no/such.prom
simulate W --trace t.jsonl --prometheus t.jsonl | t.jsonl
simulate W --trace t.jsonl --out d | --trace and --out
simulate jsonl:mine.jsonl --trace mine.jsonl | mine.jsonl
simulate W --config - | '--config'
simulate W --config none.toml | none.toml
simulate W --config '' | '--config'
simulate W --config . | .
export good.jsonl --to mooncake --out good.jsonl | good.jsonl
export good.jsonl --to mooncake --out - | '--out'
export none.jsonl --to mooncake --out x | none.jsonl
# replay
replay none.jsonl | none.jsonl
replay '' | 'FILE'
replay . | .
replay good.jsonl --at x | 'x'
replay good.jsonl --at -1 | '-1'
replay good.jsonl --at 1 --eviction lfu | --at
replay good.jsonl --eviction nope | 'nope'
replay good.jsonl --blocks 0 | blocks
replay good.jsonl --blocks x | '--blocks'
replay good.jsonl --block-size 0 | block size 0
replay good.jsonl --scheduler nope | 'nope'
replay good.jsonl --latency nope | 'nope'
replay good.jsonl --max-tokens 0 | max_tokens
replay good.jsonl --steps x | 'x'
replay good.jsonl --slo x | 'x'
replay good.jsonl --rate-scale 0 | rate_scale
replay good.jsonl --export good.jsonl | good.jsonl
replay good.jsonl --export - | '--export'
# record, sweep, calibrate, demo
record --zmq nowhere -o x.jsonl | nowhere
record --zmq tcp://h:x -o x.jsonl --for 1 | tcp://h:x
record --zmq tcp://127.0.0.1:1 -o x.jsonl --for 0 | '--for'
record --zmq tcp://127.0.0.1:1 -o x.jsonl --for x | '--for'
record --zmq tcp://127.0.0.1:1 -o x.jsonl --for -1 | '--for'
record --zmq tcp://127.0.0.1:1 -o x.jsonl --batches 0 | '--batches'
record --zmq tcp://127.0.0.1:1 -o x.jsonl --ranks 0 | '--ranks'
record --zmq tcp://127.0.0.1:1 -o x.jsonl --ranks 99999 | rank 65535 would have port 65536
record --zmq tcp://127.0.0.1:1 -o x.jsonl --rotate x | '--rotate'
record --zmq tcp://127.0.0.1:1 -o x.jsonl --rotate 0s | '--rotate'
record --zmq tcp://127.0.0.1:1 -o x.jsonl --rotate 0B | '--rotate'
record --zmq tcp://127.0.0.1:1 -o x.jsonl --rotate 1 | '--rotate'
record --zmq tcp://127.0.0.1:1 -o x.jsonl --rotate h | '--rotate'
record --zmq tcp://127.0.0.1:1 -o x.jsonl --rotate '1 GiX' | '--rotate'
record --zmq tcp://127.0.0.1:1 -o x.jsonl --reconnect 0 | '--reconnect'
record --zmq tcp://127.0.0.1:1 -o x.jsonl --replay-timeout x | '--replay-timeout'
record --zmq tcp://127.0.0.1:1 -o x.jsonl --replay nowhere | nowhere
record --zmq tcp://127.0.0.1:1 -o no/such/x.jsonl --for 1 | no/such/x.jsonl
record --zmq tcp://127.0.0.1:1 -o . --for 1 | directory
record --zmq tcp://127.0.0.1:1 -o - | '--out'
sweep none.toml | none.toml
sweep - | 'NAME.TOML'
sweep grid.toml --jobs 0 | '--jobs'
sweep grid.toml --jobs x | '--jobs'
sweep grid.toml --executor mars | 'mars'
sweep grid.toml --out x.pdf | x.pdf
sweep grid.toml --out '' | '--out'
calibrate none.csv | none.csv
calibrate good.jsonl | good.jsonl
calibrate . | .
calibrate steps.csv --latency nope | 'nope'
calibrate steps.csv --latency table | 'path'
calibrate '' | STEPS
demo cache --output 0 | '--output'
demo cache --prompt-tokens x | '--prompt-tokens'
demo cache --block-size -1 | '--block-size'
demo cache --seed x | '--seed'
demo cache --output 99999999999999999999 | '--output'
# quality
quality --budget x | --budget x: expected shares of the full bytes, such as 0.1,0.25
quality --budget 0.5,2 | budget 2: give shares of the full bytes
quality --budget 0 | budget 0: give shares
quality --tokens 0 | '--tokens'
quality --needles -1 | '--needles'
quality --needles 200 | 200 needles in 512 tokens of 1024 token ids
quality --retention h3o | no retention plugin is named 'h3o' (did you mean 'h2o'?)
quality --retention h2o:budgt=3 | (did you mean 'budget'?)
quality --codec int3 | no codec plugin is named 'int3'
quality --generator sincos:layers=1 | generator 'sincos' has no logits
quality --generator huggingface:model=./nowhere | there is no such folder
quality --plot q.pdf | --plot q.pdf: a name says what is drawn; end it with .png or .svg
quality --plot - | '--plot'
quality --text good.jsonl --texts 99 | the text has
quality --text nowhere.txt | nowhere.txt
quality extra | unexpected extra argument
"""

CONFIGS = r"""
simulate: blocks = | is not TOML
simulate: = 3 | is not TOML
simulate: bloks = 3 | 'bloks' (did you mean 'blocks'?)
simulate: blocks = 3\nblocks = 4 | is not TOML
simulate: max-tokens = 3\nmax_tokens = 4 | 'max_tokens'
simulate: blocks = "many" | blocks
simulate: blocks = 1.5 | blocks
simulate: blocks = true | blocks
simulate: blocks = [1, 2] | blocks
simulate: blocks = {a = 1} | blocks
simulate: blocks = 0 | blocks
simulate: blocks = -5 | blocks
simulate: blocks = 99999999999999999999999 | blocks
simulate: blocks = 10\nmemory = "1GiB" | c.toml: blocks and memory
simulate: trace = "a"\nout = "b" | c.toml: trace and out
simulate: memory = 5 | memory
simulate: memory = "5" | memory
simulate: memory = "1B" | memory
simulate: memory = 1979-05-27 | memory
simulate: model = 3 | model
simulate: model = "nope" | 'nope'
simulate: model = "" | model
simulate: device = "nope" | 'nope'
simulate: device = [] | device
simulate: codec = "fp1" | codec: no codec plugin is named 'fp1'
simulate: codec = 16 | codec: 16 is no plugin
simulate: tensor_parallel = 0 | tensor_parallel
simulate: tensor_parallel = "x" | tensor_parallel
simulate: eviction = 3 | eviction
simulate: eviction = "nope" | 'nope'
simulate: eviction = "" | eviction
simulate: eviction = {half_life = 3} | eviction
simulate: eviction = {name = "lfu", half_live = 3} | 'half_live'
simulate: eviction = {name = "lfu", half_life = "x"} | 'half_life'
simulate: eviction = {name = "lfu", half_life = [1]} | eviction
simulate: eviction = {name = 3} | eviction
simulate: eviction = ["lru", "lfu"] | eviction
simulate: [eviction]\nname = "nope" | 'nope'
simulate: scheduler = "fifo" | 'fifo'
simulate: scheduler = {name = "srpt", preemptive = 3} | 'preemptive'
simulate: latency = {name = "table"} | 'path'
simulate: latency = {name = "table", path = "none.csv"} | none.csv
simulate: latency = "roofline:compute=3" | compute
simulate: prefix = "nope" | 'nope'
simulate: retention = "nope" | 'nope'
simulate: retention = {name = "window", tokens = 0} | tokens
simulate: workload = 3 | workload
simulate: workload = "nowhere" | nowhere
simulate: workload = "" | workload
simulate: workload = {name = "zipf", requests = -1} | requests
simulate: workload = {name = "nope"} | 'nope'
simulate: workload = {requests = 3} | workload
simulate: workload = ["zipf"] | workload
simulate: workload = "kv-events:none.jsonl" | none.jsonl
simulate: limit = -1 | limit
simulate: limit = "x" | limit
simulate: window = 5 | window
simulate: window = "5" | window
simulate: window = [1, 2] | window
simulate: window = "9:1" | window
simulate: slo = 5 | slo
simulate: slo = "5" | slo
simulate: slo = {ttfd = 1} | 'ttfd'
simulate: slo = {ttft = 0} | slo
simulate: slo = {ttft = "x"} | slo
simulate: slo = {ttft = true} | slo
simulate: [slo]\nttft = -1 | slo
simulate: [batching]\nmax_tokns = 3 | 'max_tokns' (did you mean 'max_tokens'?)
simulate: batching = 3 | batching
simulate: max_tokens = "x" | max_tokens
simulate: chunked = "no" | chunked
simulate: chunked = 1 | chunked
simulate: steps = "all" | steps
simulate: watermark = "x" | watermark
simulate: watermark = 3 | watermark
simulate: watermark = nan | watermark
simulate: rate_scale = 0 | rate_scale
simulate: rate_scale = inf | rate_scale
simulate: rate_scale = "x" | rate_scale
simulate: seed = "x" | seed
simulate: seed = 1.5 | seed
simulate: seed = 18446744073709551616 | seed
simulate: allocation = "x" | allocation
simulate: block_size = 0 | block_size
simulate: block_size = 7 | block_size
simulate: trace = 3 | trace
simulate: trace = "" | trace
simulate: out = true | out
simulate: prometheus = [] | prometheus
simulate: residency = "x" | residency
simulate: as_json = true | as_json
simulate: json = 3 | json
simulate: config = "x" | config
simulate: count = "x" | count
run: dtype = "fp1" | dtype
run: generator = "nope" | 'nope'
run: generator = {name = "transformer", layers = 0} | layers
run: backend = {name = "torch-cpu", attention = 3} | 'attention'
run: limit = -1 | limit
run: clock = 3 | clock
run: stop_at_eos = 1 | stop_at_eos
sweep: blocks = | is not TOML
sweep: bloks = 3 | 'bloks'
sweep: blocks = [] | blocks
sweep: blocks = ["x"] | blocks
sweep: blocks = [[1]] | blocks
sweep: blocks = 0 | blocks
sweep: blocks = 10\nmemory = "1GiB" | blocks and memory
sweep: mode = "x" | mode
sweep: mode = ["compare", "simulate"] | mode
sweep: mode = 3 | mode
sweep: mode = "compare" | blocks
sweep: mode = "compare"\nblocks = 10\nscheduler = "srpt" | scheduler
sweep: mode = "compare"\nblocks = 10\neviction = "optimum"\naccounting = "tokens" | optimum
sweep: accounting = "keys" | accounting
sweep: workload = "nowhere" | nowhere
sweep: workload = ["zipf:requests=5", "zipf:requests=x"] | requests
sweep: eviction = ["lru", "nope"] | 'nope'
sweep: eviction = "lru,lfu" | 'lru,lfu'
sweep: device = ["h100", "x"] | 'x'
sweep: model = "x" | 'x'
sweep: memory = ["1GiB", "1"] | memory
sweep: slo = ["x"] | slo
sweep: limit = [3, -1] | limit
sweep: window = ["0:5", "5"] | window
sweep: seed = [1, "x"] | seed
sweep: jobs = [1, 2] | jobs
sweep: jobs = "x" | jobs
sweep: executor = 3 | executor
sweep: out = 3 | out
sweep: tensor_parallel = [0] | tensor_parallel
sweep: watermark = [2] | watermark
sweep: max_tokens = [0] | max_tokens
sweep: latency = "roofline:compute=9" | compute
sweep: rate_scale = [0] | rate_scale
"""

INPUTS = [
    ("", "compare F", "empty"),
    ("\n\n", "compare F", "empty"),
    ("hello", "compare F", "'hello'"),
    ("[1]", "compare F", "no known workload format"),
    ("{", "compare F", "not JSON"),
    ('{"a":1}', "compare F", "no known"),
    ("a,b\n1,2", "compare F", "no known"),
    (b"\x00\x01\x02", "compare F", "no known"),
    (b"BZh91AY", "compare F", "bzip2"),
    (b"\xfd7zXZ\0a", "compare F", "xz"),
    (b"PK\3\4aa", "compare F", "zip"),
    (b"\xff\xfea\0", "compare F", "UTF-16"),
    (b"\xfe\xff\0a", "compare F", "UTF-16"),
    (b"7z\xbc\xaf\x27\x1c", "compare F", "7z"),
    (b"PAR1aa", "compare F", "Parquet"),
    (b'\x04"M\x18aa', "compare F", "lz4"),
    (gzip.compress(ROW.encode(), mtime=0)[:-9], "compare F", "stops early"),
    (gzip.compress(ROW.encode(), mtime=0) + b"x", "compare F", "stops early"),
    (b"\x1f\x8bgarbage", "compare F", "damaged"),
    (b"\x28\xb5\x2f\xfdxx", "compare F", ":1:"),
    (ROW + "\n{", "compare F", "F:2"),
    (ROW + "\n[]", "compare F", "F:2"),
    (ROW.replace("512", '"x"'), "compare F", "'input_length'"),
    (ROW.replace("512", "-1"), "compare F", "'input_length'"),
    (ROW.replace(":0,", ":-5,"), "compare F", "'timestamp'"),
    (ROW.replace(":0,", ":1e300,"), "compare F", "'timestamp'"),
    (ROW.replace("[1]", '["a"]'), "compare F", "'hash_ids[0]'"),
    (ROW.replace("[1]", "[1,2,3]"), "compare F", "'hash_ids'"),
    (ROW.replace("[1]", "{}"), "compare F", "'hash_ids'"),
    (ROW.replace('"output_length":1,', ""), "compare F", "'output_length'"),
    (ROW.replace('0,"in', '9,"in') + "\n" + ROW, "compare F", "'timestamp'"),
    (ROW.replace("512", "99999999999999999999999"), "compare F", "'input_length'"),
    (ROW.replace(":1,", ":1.5,"), "compare F", "'output_length'"),
    (REQUEST.replace('"id":1', '"id":1.5'), "compare F", "'id'"),
    (REQUEST.replace('"id":1', '"id":null'), "compare F", "'id'"),
    (REQUEST.replace('"t":0', '"t":-1'), "compare F", "'t'"),
    (REQUEST.replace("20", "-5"), "compare F", "'prompt'"),
    (REQUEST.replace('"output":1', '"output":-1'), "compare F", "'output'"),
    (REQUEST.replace("16}", "0}"), "compare F", "key_tokens"),
    (REQUEST.replace("16}", '"a"}'), "compare F", "key_tokens"),
    (REQUEST.replace("[1,2]", "[1,2,3]"), "compare F", "'keys'"),
    (REQUEST.replace("[1,2]", "[1.5]"), "compare F", "'keys[0]'"),
    (REQUEST.replace("[1,2]", "7"), "compare F", "'keys'"),
    (REQUEST + "\n" + REQUEST, "compare F --check", "id"),
    (REQUEST + "\n" + REQUEST, "simulate F", "id"),
    (REQUEST.replace("}", ',"slo":{"ttft":0}}'), "compare F", "'slo'"),
    (REQUEST.replace("}", ',"slo":3}'), "compare F", "'slo'"),
    (REQUEST.replace("}", ',"retention":[[0]]}'), "compare F", "'retention[0]'"),
    (REQUEST.replace("}", ',"priority":"x"}'), "compare F", "'priority'"),
    (REQUEST.replace("}", ',"after":7,"session":"s"}'), "simulate F", "7"),
    (REQUEST.replace("}", ',"after":7}'), "simulate F", "7"),
    (
        REQUEST + "\n" + REQUEST.replace("16}", "32}").replace('"id":1', '"id":2'),
        "compare F",
        "'keys': expected at most 1 key ",
    ),
    (
        REQUEST.replace('"prompt":20', '"prompt":0').replace("[1,2]", "[1]"),
        "compare F",
        "'keys'",
    ),
    (REQUEST, "compare mooncake:F", "F:1"),
    (ROW, "compare jsonl:F", "F:1"),
    (ROW, "compare azure:F", "F"),
    (ROW, "compare lengths:F", "F"),
    (ROW, "compare trace:F", "HEADER"),
    (ROW, "compare weka:F", "F"),
    (ROW, "compare lmcache:F", "F"),
    (ROW, "compare kv-events:F,lookups=full", "F"),
    ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "compare F", "F"),
    ("TIMESTAMP,ContextTokens,GeneratedTokens\nx,1,1", "compare F", "TIMESTAMP"),
    (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,x,1",
        "compare F",
        "ContextTokens",
    ),
    (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,1",
        "compare F",
        "F:2",
    ),
    ("a,b\n1,2", "compare lengths:F", "F"),
    ("input,output\n1,x", "compare lengths:F", "output"),
    ("", "calibrate F", "F"),
    ("a,b\n", "calibrate F", "prefill_tokens"),
    (STEPS, "calibrate F", "F"),
    (STEPS + "1,1,1,x\n", "calibrate F", "seconds"),
    (STEPS + "1,1,1,-1\n", "calibrate F", "seconds"),
    (STEPS + "-1,1,1,1\n", "calibrate F", "prefill_tokens"),
    (STEPS + "1,1,1\n", "calibrate F", "F:2"),
    (STEPS + "1,1,1,inf\n", "calibrate F", "seconds"),
    (b"\xff\xfea", "calibrate F", "UTF-16"),
    (STEPS + "1.5,1,1,1\n", "calibrate F", "prefill_tokens"),
    ("prefill_tokens,seconds\n1,1\n", "simulate W --latency table:path=F", "decode_sequences"),
    (STEPS + "1,1,1,x\n", "simulate W --latency table:path=F", "seconds"),
    ("", "simulate W --latency table:path=F", "F"),
    ("", "size F.json", "F.json"),
    ("{", "size F.json", "F.json"),
    ("[]", "size F.json", "F.json"),
    ("{}", "size F.json", "F.json"),
    ('{"model_type":"llama"}', "size F.json", "F.json"),
    ('{"model_type":"foo"}', "size F.json", "foo"),
    ('{"model_type":3}', "size F.json", "model_type"),
    (
        '{"model_type":"llama","num_hidden_layers":-1,"hidden_size":8,"num_attention_heads":2,"vocab_size":9,"intermediate_size":9}',
        "size F.json",
        "num_hidden_layers",
    ),
    (
        '{"model_type":"llama","num_hidden_layers":"x","hidden_size":8,"num_attention_heads":2}',
        "size F.json",
        "num_hidden_layers",
    ),
    (
        '{"model_type":"llama","num_hidden_layers":1e9,"hidden_size":8,"num_attention_heads":0}',
        "size F.json",
        "F.json",
    ),
    (b"\xff\xfe\x00", "size F.json", "F.json"),
    ("[]", "simulate W --model F.json", "--model"),
]
"""Content of the file F, a command line, and a fragment of its error."""

TRACES = [
    (lambda t: t[:1], "replay F", "incomplete"),
    (lambda t: t[:40], "explain F 99999", "99999"),
    (lambda t: [t[0][:50]], "replay F", "F"),
    (lambda t: t[1:], "replay F", "not a kvcore trace"),
    (lambda t: [t[0], t[2]], "replay F", "F:2"),
    (lambda t: [*t[:5], "{", *t[5:]], "replay F", "F:6"),
    (lambda t: [t[0].replace('"schema":1', '"schema":99'), *t[1:]], "replay F", "schema"),
    (lambda t: [t[0].replace('"blocks":600', '"blocks":-1'), *t[1:]], "replay F", "blocks"),
    (lambda t: [t[0].replace('"blocks":600', '"blocks":"x"'), *t[1:]], "replay F", "blocks"),
    (lambda t: t[:-1], "replay F --eviction lfu", "F"),
    (lambda _: [ROW], "replay F", "not a kvcore trace"),
    (lambda _: ["[1]"], "replay F", "F"),
    (lambda _: [], "replay F", "F"),
    (lambda _: [ROW], "export F --to vllm --out o", "F"),
    (lambda _: [], "export F --to mooncake --out o", "F"),
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


def refused(folder, words, codes=(2, 3)):
    """Run a command line that must fail with one of `codes`, and return its error.

    Stdout must be empty, unless the code 1 of a partial report is allowed.
    """
    done = run_here(*[WORKLOAD if word == "W" else word for word in words], cwd=folder)
    assert done.returncode in codes
    assert not done.stdout or 1 in codes
    assert done.stderr.startswith("kvcore: error: ")
    return done.stderr


def rows(table):
    """Return the (left, right) pairs of the lines of a table in text."""
    lines = [line for line in table.strip().splitlines() if not line.startswith("#")]
    return [tuple(line.rsplit(" | ", 1)) for line in lines]


@pytest.mark.parametrize(("line", "fragment"), rows(LINES))
def test_wrong_lines_are_refused_by_name(folder, line, fragment):
    """The error for a wrong command line names what is wrong; nothing is printed or written."""
    before = set(folder.iterdir())
    assert fragment in refused(folder, shlex.split(line))
    assert set(folder.iterdir()) == before


@pytest.mark.parametrize(("config", "fragment"), rows(CONFIGS))
def test_wrong_files_of_options_are_refused_by_name(folder, config, fragment):
    """The error for a wrong configuration file names the file, and the key or the value."""
    verb, _, text = config.partition(": ")
    text = text.replace("\\n", "\n")
    own = "workload" in text
    (folder / "c.toml").write_text(text if own or verb != "sweep" else GRID + text)
    words = [verb, "c.toml"] if verb == "sweep" else [verb, "--config", "c.toml"]
    error = refused(folder, words if own or verb == "sweep" else [*words, "W"])
    assert "c.toml" in error
    assert fragment in error


@pytest.mark.parametrize(("content", "line", "fragment"), INPUTS)
def test_wrong_inputs_are_refused_by_name(folder, content, line, fragment):
    """The error for a wrong input names the file, line or field, or the format found."""
    name = "F.json" if "F.json" in line else "F"
    is_text = isinstance(content, str)
    (folder / name).write_bytes(content.encode() if is_text else content)
    assert fragment in refused(folder, line.split(), codes=(1, 2, 3))


@pytest.mark.parametrize(("edit", "line", "fragment"), TRACES)
def test_wrong_traces_are_refused_by_name(folder, edit, line, fragment):
    """The error for a damaged, cut or foreign trace names the file, the line or the fault."""
    lines = (folder / "good.jsonl").read_text().splitlines()
    (folder / "F").write_text("".join(f"{each}\n" for each in edit(lines)))
    assert fragment in refused(folder, line.split(), codes=(1, 2, 3))
