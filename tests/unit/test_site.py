import math
from dataclasses import asdict, replace

import pytest

from launcher.base.errors import ConfigError
from launcher.config.load import load
from launcher.config.save import dump
from launcher.config.site_rules import secret_faults, secret_variable_faults, site_faults
from launcher.contract.site import SiteConfig
from launcher.typed.read import plain
from tests.helpers.configs import compose_sound


def told(**settings):
    """The faults of a site with some settings, as path=given: rule. fix."""
    site = replace(SiteConfig(), **settings)
    return [str(fault) for fault in site_faults(site)]


def test_the_site_none_is_what_the_schema_says_where_nothing_is_set():
    composed = compose_sound("quickstart", ["site=none"])
    assert load(composed.values, composed.sources).site == SiteConfig()
    assert set(composed.values["site"]) == set(asdict(SiteConfig()))


@pytest.mark.parametrize(
    ("limit", "limit_s"),
    [
        ("90", 5400),
        ("90:30", 5430),
        ("00:10:00", 600),
        ("100:00:00", 360_000),
        ("3-00", 259_200),
        ("7-00:00", 604_800),
        ("2-12:30", 217_800),
        ("1-12:30:00", 131_400),
        ("0", math.inf),
        ("00:00:00", math.inf),
        ("UNLIMITED", math.inf),
        ("infinite", math.inf),
    ],
)
def test_a_time_is_the_same_from_a_file_from_the_command_line_and_in_a_saved_one(own_folder, limit, limit_s):
    recipe = own_folder / "ours.yaml"
    text = "defaults: [/base, override /data: shakespeare, _self_]\n"
    text += "batch: {global_size: 2, micro_size: 1, seq_length: 8}\n"
    recipe.write_text(f"{text}site: {{time_limit: {limit}}}\n")
    found = [compose_sound(str(recipe)), compose_sound(str(recipe), [f"site.time_limit={limit}"])]
    recipe.write_text(dump(load(found[0].values, found[0].sources)))
    sites = [load(each.values, each.sources).site for each in (*found, compose_sound(str(recipe)))]
    assert [site.time_limit for site in sites] == [limit] * 3
    assert {site.time_limit_s for site in sites} == {limit_s}
    assert told(time_limit=limit) == []


@pytest.mark.parametrize(
    "limit", ["1h", "1:", "1-", ":30", "1:2:3:4", "1-2-3", "1:60", "-1", "999999-00", "soon"]
)
def test_what_is_no_time_is_refused_with_the_forms(limit):
    (fault,) = told(time_limit=limit)
    assert fault == (
        f"site.time_limit={limit}: must be a time as Slurm takes it: minutes, MM:SS, HH:MM:SS, D-HH, "
        "D-HH:MM, D-HH:MM:SS, UNLIMITED. Half a day is written as 12:00:00, a day and a half as 1-12:00:00."
    )


@pytest.mark.parametrize("memory", ["0", "64G", "64GB", "64g", "500000"])
def test_memory_is_a_number_with_a_unit(memory):
    assert told(memory_per_node=memory) == []


@pytest.mark.parametrize(
    ("memory", "ways"), [("4 GB", "4G or null"), ("64GiB", "64G or null"), ("1.5T", "null"), ("all", "null")]
)
def test_memory_in_other_words_is_refused_with_what_it_means(memory, ways):
    (fault,) = told(memory_per_node=memory)
    assert fault == (
        f"site.memory_per_node={memory}: must be a whole number with K, M, G or T (M where none is given). "
        f"Set site.memory_per_node={ways}."
    )


def test_a_typed_gpu_request_and_its_type_need_each_other():
    assert told(gpu_request="gres_typed", gpu_type="h100") == []
    (alone,) = told(gpu_request="gres_typed")
    assert alone.endswith("Set site.gpu_type, or site.gpu_request=gres.")
    (useless,) = told(gpu_type="h100")
    assert useless == (
        "site.gpu_type=h100: has no effect while site.gpu_request is gpus_per_node. "
        "Set site.gpu_request=gres_typed."
    )


@pytest.mark.parametrize("binding", ["none", "cores", "quiet,rank", "mask_cpu:0x3,0xc", "map_ldom:0,1"])
def test_a_binding_is_one_of_sruns(binding):
    assert told(cpu_bind=binding) == []


def test_another_binding_is_refused():
    (fault,) = told(cpu_bind="core")
    assert fault.startswith("site.cpu_bind=core: must be what srun's --cpu-bind takes: none, sockets, cores,")
    assert fault.endswith("Set site.cpu_bind=cores or null.")
    (far,) = told(cpu_bind="gpu")
    assert far.endswith("Set site.cpu_bind=null.")


def test_temporary_files_have_one_place():
    assert told(scratch="/scratch/$USER") == []
    assert told(scratch="/scratch/$USER", env={"TMPDIR": "/tmp"}) == [
        "site.env.TMPDIR=TMPDIR: is given already as site.scratch. Remove one of them."
    ]


def test_a_variable_that_every_rank_gets_is_not_the_sites_to_set():
    assert told(env={"MASTER_PORT": "1"}) == [
        "site.env.MASTER_PORT=MASTER_PORT: is set by the job for every rank. Remove MASTER_PORT."
    ]


def test_a_variable_given_twice_names_both_places():
    (fault,) = told(env={"NCCL_DEBUG": "INFO"}, forward=("NCCL_DEBUG",))
    assert fault.startswith("site.forward[0]=NCCL_DEBUG: is given already as site.env.NCCL_DEBUG")


def test_a_value_among_the_names_is_refused_without_showing_it():
    (fault,) = secret_variable_faults(replace(SiteConfig(), secrets=("HF_TOKEN=abc123",)))
    assert (fault.path, fault.given, fault.allowed) == (
        "site.secrets[0]",
        "***",
        "must be the name of a variable, without its value",
    )
    assert "abc123" not in fault.fix


def test_a_secret_in_the_clear_is_refused_without_showing_it():
    (fault,) = secret_variable_faults(replace(SiteConfig(), env={"WANDB_API_KEY": "abc123"}))
    assert (fault.path, fault.given) == ("site.env.WANDB_API_KEY", "***")
    assert "site.secrets=[WANDB_API_KEY]" in fault.fix


def test_a_word_that_is_no_name_is_no_variable():
    assert told(forward=("A-B",)) == [
        "site.forward[0]=A-B: is not the name of a variable. Use letters, digits and _."
    ]


@pytest.mark.parametrize("key", ["api_key", "db_password", "SECRET", "auth_token", "access_key"])
def test_a_secret_in_a_users_own_option_is_refused_without_showing_it(key):
    (fault,) = secret_faults({"data": {"options": {key: "abc123"}}})
    assert (fault.path, fault.given) == (f"data.options.{key}", "***")


@pytest.mark.parametrize("key", ["eos_token", "tokenizer", "num_kv_heads", "key"])
def test_other_options_are_no_secrets(key):
    assert list(secret_faults({"data": {"options": {key: "abc123"}}})) == []


def test_a_secret_inside_a_list_is_refused():
    faults = secret_faults({"data": {"options": {"hubs": [{"api_key": "abc123"}]}}})
    assert [fault.path for fault in faults] == ["data.options.hubs[0].api_key"]


def test_no_shipped_setting_is_taken_for_a_secret():
    composed = compose_sound("quickstart")
    assert list(secret_faults(plain(load(composed.values, composed.sources)))) == []


def test_a_secret_on_the_command_line_is_not_repeated_by_the_error():
    composed = compose_sound("quickstart", ["+site.env.HF_TOKEN=abc123"])
    with pytest.raises(ConfigError, match=r"site\.env\.HF_TOKEN=\*\*\*: looks like a secret") as caught:
        load(composed.values, composed.sources)
    assert "abc123" not in str(caught.value)
    assert str(caught.value).endswith("[override +site.env.HF_TOKEN=***]")


def test_mounts_need_an_image_and_two_paths():
    assert told(container_image="a.sqsh", container_mounts=("/data:/data:ro",)) == []
    (useless,) = told(container_mounts=("/data:/data",))
    assert "has no effect without site.container_image" in useless
    (broken,) = told(container_image="a.sqsh", container_mounts=("/data",))
    assert broken == (
        "site.container_mounts[0]=/data: must be SOURCE:TARGET or SOURCE:TARGET:FLAGS, without commas. "
        "Set site.container_mounts.0=/data:/data."
    )
    (unclear,) = told(container_image="a.sqsh", container_mounts=("/a,/b",))
    assert unclear.endswith("A folder of the node with its place in the container reads /data:/data.")
