# The targets that ask instead of make: `gate` fails when a required row is not `pass`, `audit` lists stale results.
rule gate:
    input:
        records("tabulate"),
    log:
        "results/logs/gate.log",
    localrule: True
    params:
        config=keys.pack(canonical(config)),
    shell:
        asking("gate")


rule audit:
    log:
        "results/logs/audit.log",
    localrule: True
    params:
        config=keys.pack(canonical(config)),
    shell:
        asking("audit")
