# `make ppo` and `make test` do all the set-up; `make results` makes every model and table of docs/results.md.
PYTHON ?= python3
RUN = .venv/bin/python

.PHONY: ppo test results clean

ppo: .venv/ready
	$(RUN) ppo.py 10 0.05

test: .venv/ready-dev
	$(RUN) -m ruff check .
	$(RUN) -m mypy
	$(RUN) -m pytest -n auto --maxprocesses 4 --dist loadfile

.venv/ready: requirements.txt
	$(PYTHON) -m venv .venv
	$(RUN) -m pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@

.venv/ready-dev: requirements-dev.txt .venv/ready
	$(RUN) -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	touch $@

clean:
	rm -rf .venv

# Every headline figure. `make -n results` shows the plan; Ctrl-C stops after the step under way, and the same command
# goes on: what is finished has a file in runs/results/ and is skipped, what was begun is resumed from its state.
#
#     make results STORIES=PATH     from raw stories on; without STORIES, from the shipped models
#
# Minutes are those of two Zen 4 cores, the machine to itself.
R = runs/results
RATES = 1e-5 1e-4
DPO_RATES = 1e-5 5e-5 1e-4
RESUME = $$(test -f $(1) && echo --resume)

results: $(R)/ppo-rates/table.md $(R)/comparison/table.md $(R)/dpo-rates/table.md $(R)/reinforce-controls/table.md \
	$(R)/ablations/table.md

.NOTPARALLEL:
.SECONDARY:

$(R)/start: | .venv/ready
	mkdir -p $(R)
	touch $@

ifdef STORIES
$(R)/data: $(R)/start
	# 1 minute
	$(RUN) prepare.py --stories $(STORIES) --new-tokenizer
	touch $@

$(R)/base: $(R)/data
	# 40 minutes
	$(RUN) train.py $(call RESUME,checkpoints/base-state.pt)
	touch $@

$(R)/finetuned: $(R)/base
	# 40 minutes
	$(RUN) finetune.py $(call RESUME,checkpoints/finetuned-state.pt)
	touch $@
else
$(R)/finetuned: $(R)/start
	touch $@
endif

# Rollouts, not minutes, end a run of PPO here, so that machines of any speed make the same models.
PPO = $(RUN) ppo.py 6000 $(1) --rollouts $(2) $(if $(filter ppo-$(1),$(3)),,--name $(3)) $(4) \
	$(call RESUME,checkpoints/$(3)/state.pt)

# Seed 1 at the settings of `make ppo`, and on from there where that has run; its rollout 20 stands beside the other rates.
$(R)/ppo-0.05: $(R)/finetuned
	# 16 minutes
	$(call PPO,0.05,48,ppo-0.05)
	touch $@

$(R)/ppo-seed-%: $(R)/finetuned
	# 16 minutes
	$(call PPO,0.05,48,ppo-seed-$*,--seed $*)
	touch $@

$(R)/ppo-0.5: $(R)/finetuned
	# 16 minutes
	$(call PPO,0.5,48,ppo-0.5)
	touch $@

$(R)/ppo-rate-%: $(R)/finetuned
	# 7 minutes
	$(call PPO,0.05,20,ppo-rate-$*,--lr $*)
	touch $@

$(R)/ppo-rates/table.md: $(R)/ppo-0.05 $(RATES:%=$(R)/ppo-rate-%)
	# 3 minutes
	$(RUN) evaluate.py checkpoints/ppo-0.05/rollout-0020.pt $(RATES:%=ppo-rate-%) --problems 0 --folder $(@D)

$(R)/pairs: $(R)/finetuned
	# 10 minutes
	$(RUN) preferences.py 2000
	touch $@

# dpo.py has one place for its model and its state: both are moved away before the next rate.
$(R)/dpo-rate-%: $(R)/pairs
	# 4 minutes
	$(RUN) dpo.py --lr $* $(call RESUME,checkpoints/dpo-state.pt)
	mv checkpoints/dpo.pt checkpoints/dpo-rate-$*.pt
	rm checkpoints/dpo-state.pt
	touch $@

$(R)/dpo-rates/table.md: $(DPO_RATES:%=$(R)/dpo-rate-%)
	# 4 minutes
	$(RUN) evaluate.py $(DPO_RATES:%=checkpoints/dpo-rate-%.pt) --problems 0 --folder $(@D)

# Likewise reinforce.py. The first is the run; the others are its controls.
$(R)/reinforce: FLAGS = 200 --evaluate-every 20 --evaluate-on 200
$(R)/reinforce-spread: FLAGS = 60 --evaluate-every 20 --evaluate-on 200 --by-spread
$(R)/reinforce-shuffled: FLAGS = 60 --evaluate-every 20 --evaluate-on 200 --shuffle
$(R)/reinforce $(R)/reinforce-spread $(R)/reinforce-shuffled: $(R)/finetuned
	# 15 seconds a step
	$(RUN) reinforce.py $(FLAGS) $(call RESUME,checkpoints/reinforce/state.pt)
	rm -rf checkpoints/$(@F)-done
	mv checkpoints/reinforce checkpoints/$(@F)-done
	touch $@

# A copy of the repository with a diff of docs/ablations.md applied; 20 rollouts, compared with the default's first 20.
ABLATIONS = critic-gradient kl-in-reward score-at-the-end lambda-0.95 top-k-50
runs/patched/%/diff: docs/ablations.md
	rm -rf $(@D)
	mkdir -p $(@D)
	git archive HEAD | tar -x -C $(@D)
	sed -n '/^```diff $*$$/,/^```$$/p' $< | sed '1d;$$d' > $(@D)/part
	patch -d $(@D) -p1 < $(@D)/part
	mv $(@D)/part $@

$(R)/ablation-%: runs/patched/%/diff $(R)/finetuned
	# 6 minutes
	cp checkpoints/finetuned.pt $(<D)/checkpoints/
	cd $(<D) && ../../../$(call PPO,0.05,20,ppo-$*)
	rm -rf checkpoints/ppo-$*
	cp -r $(<D)/checkpoints/ppo-$* checkpoints/
	touch $@

$(R)/ablations/table.md: $(ABLATIONS:%=$(R)/ablation-%) $(R)/ppo-0.05
	# 4 minutes
	$(RUN) evaluate.py checkpoints/ppo-0.05/rollout-0020.pt $(ABLATIONS:%=ppo-%) --problems 0 --folder $(@D)

# The whole suite of every model: what each method did to everything else.
$(R)/comparison/table.md: $(R)/ppo-0.05 $(R)/ppo-seed-2 $(R)/ppo-seed-3 $(R)/ppo-0.5 $(DPO_RATES:%=$(R)/dpo-rate-%) $(R)/reinforce
	# 10 minutes
	$(RUN) evaluate.py ppo-0.05 ppo-seed-2 ppo-seed-3 ppo-0.5 $(DPO_RATES:%=checkpoints/dpo-rate-%.pt) \
		reinforce-done --folder $(@D)

$(R)/reinforce-controls/table.md: $(R)/reinforce $(R)/reinforce-spread $(R)/reinforce-shuffled
	# 5 minutes; step 60 of the run beside the last of its controls
	$(RUN) evaluate.py $(foreach run,reinforce reinforce-spread reinforce-shuffled,checkpoints/$(run)-done/step-0060.pt) \
		--instructions 50 --problems 200 --folder $(@D)
