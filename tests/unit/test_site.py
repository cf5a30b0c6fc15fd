from dataclasses import asdict, replace

import pytest

from launcher.base.errors import ConfigError
from launcher.config.load import load
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


@pytest.mark.parametrize("limit", ["00:10:00", "12:30:00", "1-12:30:00"])
def test_a_time_limit_has_hours_minutes_and_seconds(limit):
    assert told(time_limit=limit) == []


def test_a_bare_number_of_minutes_is_refused_with_what_slurm_would_read():
    (fault,) = told(time_limit="750")
    assert fault == (
        "site.time_limit=750: must be HH:MM:SS or D-HH:MM:SS. Write 12:30:00, as Slurm would read it."
    )


def test_a_time_of_two_numbers_is_refused_with_both_things_it_may_mean():
    (fault,) = told(time_limit="1:30")
    assert fault.endswith("Write 00:01:30, as Slurm would read it. For hours and minutes write 01:30:00.")


def test_a_time_is_the_same_text_from_a_file_and_from_the_command_line(tmp_path):
    recipe = tmp_path / "ours.yaml"
    recipe.write_text(
        "defaults: [/base, override /data: shakespeare, _self_]\n"
        "batch: {global_size: 2, micro_size: 1, seq_length: 8}\n"
        "site: {time_limit: 12:30:00}\n"
    )
    from_file = compose_sound(str(recipe))
    from_word = compose_sound(str(recipe), ["site.time_limit=12:30:00"])
    times = [load(found.values, found.sources).site.time_limit for found in (from_file, from_word)]
    assert times == ["12:30:00", "12:30:00"]


@pytest.mark.parametrize("memory", ["0", "64G", "500000"])
def test_memory_is_a_number_with_a_unit(memory):
    assert told(memory_per_node=memory) == []


def test_memory_in_other_words_is_refused():
    (fault,) = told(memory_per_node="4 GB")
    assert fault.startswith("site.memory_per_node=4 GB: must be a whole number with K, M, G or T")


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
    assert fault.endswith("Write cores, or null for the site's default.")


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
    assert broken.startswith("site.container_mounts[0]=/data: must be SOURCE:TARGET")
