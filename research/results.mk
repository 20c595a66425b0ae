# Every panel of docs/results.md; research/results/ holds what they printed. Included by the Makefile.

PROBES := probe:qwen2:0,probe:qwen2:1,probe:qwen2:2,probe:qwen3:0,probe:qwen3:1,probe:qwen3:2
NEEDLE := probe-needle:questions=8
CHASE  := probe-chase:questions=6
ASKED  := $(NEEDLE),probe-scattered:questions=8,$(CHASE)
PROSE  := niah-single:haystack=prose,niah-multikey:haystack=prose
KINDS  := niah-single:haystack=prose,niah-multikey:haystack=needles,niah-single,variable-tracking:haystack=prose,frequent-words
FIVE   := dense,topk,quest,router,router-on-quest
PLANES := outliers:m=1,c=0.5
BARE   := topk-on-$(PLANES),aggregate=softmax
HALF   := auto:tile_factor=1
MORE   := auto:tile_factor=2.75,router-on-quest
OURS   := quest,auto,$(BARE),$(BARE),tile_factor=1,$(MORE)
LONGER := quest,auto,$(HALF),$(MORE)
ORACLE := topk-on-true-mass:aggregate=mass-max
UNEVEN := top-p-on-$(PLANES)
DENSER := auto:factor=dense,give=0.125
OTHERS := $(BARE),last-tile-on-quest,topk,topk-on-box:c=0.5,aggregate=softmax,topk-on-outliers:m=2,aggregate=softmax
SCORERS := mean quest box outliers moba nsa minference-block minference snapkv h2o xattention
, := ,
GRID   := $(foreach s,$(SCORERS),topk-on-$s$(,)router-on-$s$(,)last-tile-on-$s$(,)fill-on-$s:aggregate=mass$(,)top-p-on-$s:aggregate=mass$(,)max-ratio-on-$s:aggregate=mass)
NOVEL  := $(foreach r,topk router last-tile,$r-on-$(PLANES)$(,)aggregate=softmax)
REDUCED := $(foreach s,quest outliers,topk-on-$s $(foreach a,mass mass-max softmax,topk-on-$s:aggregate=$a) $(foreach r,fill top-p max-ratio,$r-on-$s:aggregate=mass-max))
REAL   := $(foreach s,$(filter-out quest,$(SCORERS)) true-mass,topk-on-$s) \
	  $(foreach r,router last-tile,$r-on-quest $r-on-$(PLANES)$(,)aggregate=softmax) \
	  $(foreach r,fill top-p max-ratio,$r-on-quest:aggregate=mass $r-on-$(PLANES)$(,)aggregate=mass)
RING   := $(BIN)/closecall compare --against quest,router-on-quest
R      := out/results
CODE   := code-function:bare=yes,code-constant
NEEDLES := niah-single:questions=8,haystack=code,niah-multikey:keys=16,questions=8,haystack=manuals
TRACKED := variable-tracking:chains=8,questions=8,haystack=code,pointer-chase:distractors=9,questions=8,haystack=code
EASIER := $(foreach h,1 2,variable-tracking:hops=$h$(,)chains=8$(,)questions=8$(,)haystack=code pointer-chase:hops=$h$(,)distractors=9$(,)questions=8$(,)haystack=code)
FIRST  := auto:factor=2,give=0.5
TEXTS  := text:kind=code,text:kind=manuals,text:kind=docstrings,text:kind=licences,text:kind=json
TUNED  := tuned:qwen2.5-coder-1.5b
MAIN   := dense,quest,router-on-quest,router-on-quest/matched,auto
DTYPE  ?= bf16  # fp32 on a machine without bfloat16 instructions, which would take ten times as long
QWEN   := $(BIN)/closecall eval --model qwen2.5-coder-1.5b --dtype $(strip $(DTYPE)) --jobs 2 --store $R/qwen2.5-coder-1.5b.db
FRONT  := $(subst 1.5b.db,1.5b-frontier.db,$(QWEN))
QUART  := $(subst 1.5b.db,1.5b-quarter.db,$(QWEN))
EASY   := $(subst 1.5b.db,1.5b-needles.db,$(QWEN))
TOP_P := last-tile-on-$(PLANES),rule=top-p,aggregate=mass-max,factor=dense,give=0.3
FINER  := block=32,tile=32,tile_factor=4
KEPT   := quest,quest:share=group,topk,router-on-quest,auto,auto:c=0.25,auto:pool=16,auto:pool=64,candidates=4,auto:share=group,auto:block=32,tile=64,tile_factor=4,auto:$(FINER),$(TOP_P),$(TOP_P),$(FINER),$(ORACLE)
RANKED := quest,topk,router-on-quest,auto,auto:scorer=true-mass,aggregate=mass
GEMMA  := $(BIN)/closecall eval --model gemma-3-270m --store $R/gemma-3-270m.db

results-large: $(READY)  ## The panels of Qwen2.5-Coder-1.5B and Gemma 3 (many hours; they go on from what research/results/stores has)
	mkdir -p $R && cp -n research/results/stores/*.db $R/
	$(BIN)/closecall get qwen2.5-coder-1.5b
	$(BIN)/closecall get gemma-3-270m
	$(QWEN) --tasks $(CODE) --contexts 8k --budgets 8 --n 6 --policies $(MAIN),router-on-quest/random,router-on-quest/last,$(TUNED)
	$(QWEN) --tasks $(TEXTS) --contexts 8k --budgets 8 --n 2 --policies $(TUNED),auto,quest,router-on-quest
	$(QWEN) --tasks text:kind=code,text:kind=manuals --contexts 8k --budgets 8 --n 3 --policies $(TUNED),auto,quest,router-on-quest
	$(FRONT) --tasks $(TEXTS) --contexts 8k,16k --budgets 8,4,16 --n 1 --policies $(TUNED),$(TUNED):times=0.5,$(TUNED):times=2,auto,quest,router-on-quest
	$(QWEN) --tasks $(CODE) --contexts 16k --budgets 16 --n 3 --policies $(MAIN),$(TUNED):times=2
	$(QWEN) --tasks code-function:bare=yes --contexts 32k --budgets 32 --n 2 --policies $(MAIN),$(TUNED):times=4
	$(QWEN) --tasks code-constant --contexts 32k --budgets 32 --n 1 --policies $(MAIN),$(TUNED):times=4
	$(QUART) --tasks $(CODE) --contexts 8k --budgets 8,16 --n 6 --policies $(MAIN),$(TUNED)
	$(EASY) --tasks $(NEEDLES) --contexts 8k --budgets 8 --n 1 --policies dense,$(TUNED),auto,quest
	$(EASY) --tasks $(TRACKED) --contexts 8k --n 1 --policies dense
	$(EASY) --tasks $(subst $() ,$(,),$(EASIER)) --contexts 2k --n 1 --policies dense
	$(QWEN) --tasks $(CODE) --contexts 4k --budgets 4 --n 3 --policies $(MAIN),$(TUNED):times=0.5
	$(QWEN) --tasks $(CODE) --contexts 8k --budgets 8 --n 6 --policies $(FIVE),auto --controls
	$(BIN)/closecall profile --model qwen2.5-coder-1.5b --contexts 8k --budgets 8,16 --dtype $(strip $(DTYPE)) --policies quest,router-on-quest,auto,$(TUNED) --rounds 1 --out $R/profile
	$(BIN)/closecall pareto --store $R/qwen2.5-coder-1.5b-quarter.db --profile $R/profile/profile-qwen2.5-coder-1.5b.json --out $R/pareto
	$(BIN)/closecall compare capture --model qwen2.5-coder-1.5b --dtype $(strip $(DTYPE)) --save-as bf16 --contexts 8k --n 2 --layers 0,3,6,9,12,15,18,21,24,27 \
	  --tasks code-function:bare=yes,niah-multikey:keys=16,haystack=manuals --out $R/capture-qwen
	$(BIN)/closecall compare --captured $R/capture-qwen --split choose --budgets 8 --seconds 0 --against auto --policies $(KEPT) --out $R/qwen-choose
	$(BIN)/closecall compare --captured $R/capture-qwen --split final --budgets 8 --seconds 0 --against auto --policies $(KEPT) --out $R/qwen-final
	$(GEMMA) --tasks $(TEXTS) --contexts 4k --budgets 4 --n 3 --policies topk,quest,auto
	$(GEMMA) --tasks $(TEXTS) --contexts 8k --budgets 8 --n 1 --policies dense,topk,quest
	$(BIN)/closecall compare capture --model gemma-3-270m --dtype $(strip $(DTYPE)) --save-as bf16 --layers 5,11,17 --tasks $(KINDS) --contexts 4k --n 2 --out $R/capture-gemma
	$(BIN)/closecall compare --captured $R/capture-gemma --split choose --budgets 4 --seconds 0 --against quest --policies $(RANKED) --out $R/gemma-choose
	$(BIN)/closecall compare --captured $R/capture-gemma --split final --budgets 4 --seconds 0 --against quest --policies $(RANKED) --out $R/gemma-final

# `auto` in most tables of docs/results-selectors.md is its first edition, auto:factor=2,give=0.5; these commands run today's.
results: $(READY)  ## Every other panel of docs/results.md, into out/results (many hours; resumes where it was stopped)
	mkdir -p $R && cp -n research/results/stores/*.db $R/
	$(BIN)/closecall get smollm2
	$(BIN)/closecall eval --models probe:qwen2,probe:qwen3 --tasks $(NEEDLE) --contexts 8k,16k,32k --budgets 3 --n 25 --controls --store $R/probes.db
	$(BIN)/closecall eval --models probe:qwen2,probe:qwen3 --tasks $(CHASE) --contexts 8k,16k,32k --budgets 5 --n 34 --controls --store $R/probes.db
	$(BIN)/closecall report --store $R/probes.db --out $R/probes
	$(BIN)/closecall eval --models $(PROBES) --tasks $(NEEDLE),$(CHASE) --contexts 8k --budgets 16,32 --n 13 --policies topk,quest --store $R/kmean.db
	$(BIN)/closecall report --store $R/kmean.db --out $R/kmean
	$(BIN)/closecall eval --model smollm2 --dtype bf16 --tasks $(PROSE) --contexts 4k --budgets 4 --n 50 --policies $(FIVE),auto,tuned:smollm2 --controls --store $R/smollm2.db
	$(BIN)/closecall eval --model smollm2 --dtype bf16 --tasks $(PROSE) --contexts 8k --budgets 8 --n 50 --policies $(FIVE),auto --controls --store $R/smollm2.db
	$(BIN)/closecall eval --model smollm2 --dtype bf16 --tasks $(PROSE) --contexts 4k --budgets 4 --n 12 \
	  --policies dense,quest,auto,$(DENSER),auto:factor=dense,give=0.0625,auto:factor=4,auto:factor=dense --store $R/asked.db
	$(BIN)/closecall report --store $R/asked.db --out $R/asked
	$(BIN)/closecall eval --model smollm2 --dtype fp32 --tasks niah-single:questions=16,haystack=prose,niah-multikey:keys=8,questions=8,haystack=prose \
	  --contexts 4k --budgets 4 --n 4 --policies dense,quest,auto,auto:pool=16,auto:c=0.25,auto:block=32,tile=64,tile_factor=4,auto:pool=64,candidates=4,auto:scorer=true-mass,aggregate=mass,tuned:smollm2 --store $R/smollm2-ring.db
	$(BIN)/closecall eval --model smollm2 --dtype fp32 --tasks niah-single:questions=16,haystack=prose,niah-multikey:keys=8,questions=8,haystack=prose \
	  --contexts 4k --budgets 4,6,8,12 --n 4 --policies dense,quest,router-on-quest,auto --store $R/smollm2-ring.db
	$(BIN)/closecall eval --model smollm2 --dtype bf16 --tasks $(TEXTS) --contexts 4k --budgets 4 --n 3 \
	  --policies quest,router-on-quest,auto,auto:factor=2,give=0.5,tuned:smollm2 --store $R/smollm2-text.db
	$(BIN)/closecall report --store $R/smollm2.db --out $R/smollm2
	$(RING) --split final --models $(PROBES) --tasks $(ASKED) --contexts 8k --budgets 4,8 --n 12 --policies $(OURS) --seconds 0 --store $R/ring.db --out $R/ring-8k
	$(RING) --split final --models $(PROBES) --tasks $(ASKED) --contexts 16k --budgets 4 --n 3 --policies $(LONGER) --seconds 0 --store $R/ring.db --out $R/ring-16k
	$(RING) --split final --models $(PROBES) --tasks $(ASKED) --contexts 32k --budgets 4 --n 3 --policies $(LONGER) --seconds 0 --store $R/ring.db --out $R/ring-32k
	$(BIN)/closecall compare --split choose --against topk-on-quest --models $(PROBES) --tasks $(ASKED) --contexts 8k --budgets 4 --n 1 --seconds 0 \
	  --policies $(subst $() ,$(,),$(GRID) $(NOVEL) topk-on-true-max topk-on-true-mass) --store $R/grid.db --out $R/grid
	$(BIN)/closecall compare --split choose --against topk-on-quest --models $(PROBES) --tasks $(ASKED) --contexts 8k --budgets 4 --n 1 --seconds 0 \
	  --policies $(subst $() ,$(,),$(REDUCED)) --store $R/grid.db --out $R/grid-reductions
	$(BIN)/closecall compare --split final --against quest --models $(PROBES) --tasks $(CHASE) --contexts 8k --budgets 4 --n 4 --seconds 0 \
	  --policies quest,$(HALF),topk-on-true-max:tile_factor=1,topk-on-true-mass:tile_factor=1 --store $R/ring.db --out $R/half-oracles
	$(BIN)/closecall compare --split final --against quest --models $(PROBES) --tasks $(ASKED) --contexts 8k --budgets 4 --n 12 --seconds 0 \
	  --policies quest,$(HALF),$(HALF),tiles=8 --store $R/ring.db --out $R/half
	$(BIN)/closecall compare --split final --against $(FIRST) --models $(PROBES) --tasks $(ASKED) --contexts 8k --budgets 4 --n 12 --seconds 0 \
	  --policies auto,$(FIRST) --store $R/ring.db --out $R/editions-8k
	$(BIN)/closecall eval --model probe:qwen2 --tasks $(ASKED) --contexts 16k,32k --budgets 33 --n 4 --policies dense,auto --store $R/default.db
	$(BIN)/closecall compare capture --model smollm2 --tasks $(KINDS) --contexts 4k --n 4 --save-as bf16 --max-gb 30 --out $R/capture
	$(RING) --split choose --captured $R/capture --policies quest,auto,$(BARE),auto:factor=dense,give=0.2,$(DENSER) --budgets 4 --seconds 0 --out $R/captured-choose
	$(BIN)/closecall compare --split choose --against quest --captured $R/capture --budgets 4 --seconds 0 --out $R/captured-grid \
	  --policies $(subst $() ,$(,),quest $(REAL) $(BARE) $(ORACLE) $(ORACLE),tile_factor=1 fill-on-true-mass:aggregate=mass,tile_factor=1)
	$(BIN)/closecall compare --split choose --against quest,auto --captured $R/capture --budgets 4 --seconds 0 --out $R/captured-uneven \
	  --policies quest,auto,$(UNEVEN),aggregate=mass,$(UNEVEN),aggregate=mass-max,fill-on-$(PLANES),aggregate=mass-max,last-tile-on-$(PLANES),rule=top-p,aggregate=mass-max
	$(RING) --split final --captured $R/capture --policies $(LONGER),$(DENSER),$(OTHERS),$(ORACLE),$(ORACLE),tile_factor=1 --budgets 4 --by-layer --seconds 2 \
	  --out $R/captured
