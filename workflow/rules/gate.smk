# The targets that ask instead of make: `gate` fails when a required row is not `pass`, `audit` lists stale results.
rule gate:
    input:
        records("tabulate"),
    log:
        "results/logs/gate.log",
    localrule: True
    params:
        config=lambda w: keys.pack(canonical(config)),  # a function: braces in it are no wildcards
    shell:
        asking("gate")


rule audit:
    log:
        "results/logs/audit.log",
    localrule: True
    params:
        config=lambda w: keys.pack(canonical(config)),  # a function: braces in it are no wildcards
    shell:
        asking("audit")
