# kvgate: which KV cache, at which quantization, gives the right tokens on a Rockchip NPU.
# A table of contents: the stages lie in workflow/rules, their code in workflow/kvgate, what to build in config/.
from snakemake.utils import min_version

min_version("9.27")


include: "workflow/rules/common.smk"
include: "workflow/rules/fetch.smk"
include: "workflow/rules/trace.smk"
include: "workflow/rules/prepare.smk"
include: "workflow/rules/export.smk"
include: "workflow/rules/check.smk"
include: "workflow/rules/build.smk"
include: "workflow/rules/probe.smk"
include: "workflow/rules/selftest.smk"
include: "workflow/rules/run.smk"
include: "workflow/rules/verify.smk"
include: "workflow/rules/judge.smk"
include: "workflow/rules/accuracy.smk"
include: "workflow/rules/diagnose.smk"
include: "workflow/rules/tabulate.smk"


rule all:
    default_target: True
    input:
        records("tabulate"),
    localrule: True


rule graphs:
    input:
        records("check"),
    localrule: True


rule artifacts:
    input:
        records("build"),
    localrule: True


rule verified:
    input:
        records("judge"),
    localrule: True


include: "workflow/rules/gate.smk"
