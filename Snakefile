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
include: "workflow/rules/verify.smk"
include: "workflow/rules/judge.smk"
include: "workflow/rules/tabulate.smk"


localrules:
    all,
    graphs,
    artifacts,
    verified,
    gate,
    audit,


rule all:
    default_target: True
    input:
        records("tabulate"),


rule graphs:
    input:
        records("check"),


rule artifacts:
    input:
        records("build"),


rule verified:
    input:
        records("judge"),


include: "workflow/rules/gate.smk"
