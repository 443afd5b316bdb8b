"""Every block of Python of every page is run by a test, which is named here, or is an excerpt of a file."""

from __future__ import annotations

import ast
from collections import Counter

from tests.docs.pages import DOCS, excerpts
from tests.docs.running import all_blocks
from tests.house.tree import ROOT

_BLOCKS, _TORCH, _DOCS = "docs/test_blocks.py", "docs/test_torch_blocks.py", "house/test_docs.py"
_STORES, _SIMULATION = "backends/stores/test_stores_page.py", "simulation/test_tutorial.py"
_TUTORIALS, _RAY = "docs/test_tutorials.py", "backends/ray/test_example.py"

# By page, the tests that run its blocks, in their order.
RUN_BY: dict[str, tuple[tuple[str, str], ...]] = {
    "README.md": (("examples/test_readme.py", "test_the_composition_serves_and_swaps"),),
    "docs/adapters.md": (
        (_TORCH, "test_a_request_names_an_adapter"),
        (_BLOCKS, "test_adapters_change_as_the_page_has_it"),
    ),
    "docs/chat.md": ((_TORCH, "test_a_chat_is_answered_streamed_and_continued"),) * 2,
    "docs/checkpoints.md": ((_BLOCKS, "test_values_are_made_as_pages_have_them"),),
    "docs/device-memory.md": (
        (_TORCH, "test_engines_share_the_memory_of_a_device"),
        (_TORCH, "test_engines_of_processes_share_the_memory_of_a_device"),
    ),
    "docs/door.md": (
        (_BLOCKS, "test_a_server_listens_as_the_page_has_it"),
        (_BLOCKS, "test_the_door_opens_with_keys_as_the_page_has_it"),
        (_BLOCKS, "test_values_are_made_as_pages_have_them"),
    ),
    "docs/errors.md": ((_TORCH, "test_errors_are_told_apart"),),
    "docs/json.md": ((_TORCH, "test_an_answer_is_json_of_the_schema"),),
    "docs/kv-blocks.md": (
        (_BLOCKS, "test_a_store_of_ones_own_is_checked_by_its_suite"),
        (_BLOCKS, "test_two_stores_of_a_directory_are_shared_as_the_page_has_them"),
        (_BLOCKS, "test_a_store_on_the_machines_of_engines_is_made_as_the_page_has_it"),
    ),
    "docs/kv.md": ((_TORCH, "test_kv_blocks_are_kept_in_host_memory"),),
    "docs/llamacpp.md": ((_TORCH, "test_gguf_files_are_served_by_llama_cpp"),),
    "docs/migrate.md": ((_RAY, "test_the_fleets_of_the_guides_have_an_engine_for_each_gpu"),),
    "docs/migration.md": (
        (_BLOCKS, "test_operations_empty_an_instance_as_the_page_has_it"),
        (_TORCH, "test_links_are_encrypted"),
    ),
    "docs/nodes.md": ((_TORCH, "test_nodes_share_their_stores"),) * 2,
    "docs/operations.md": (
        (_DOCS, "test_the_operations_of_a_fleet_run_as_the_page_has_them"),
        (_DOCS, "test_a_fleet_shuts_down_on_a_signal_as_the_page_has_it"),
    ),
    "docs/parallel.md": ((_TORCH, "test_the_stages_of_a_model_are_on_another_node"),) * 3,
    "docs/policies.md": (
        *((_BLOCKS, "test_the_policies_of_their_page_are_made"),) * 4,
        (_BLOCKS, "test_a_fleet_has_the_parts_that_pages_give_it"),
        *((_BLOCKS, "test_values_are_made_as_pages_have_them"),) * 3,
    ),
    "docs/remote.md": (
        *((_TORCH, "test_an_engine_is_served_on_one_machine_and_used_on_another"),) * 2,
        *((_TORCH, "test_engines_of_processes_are_made"),) * 2,
        *((_RAY, "test_the_fleets_of_the_guides_have_an_engine_for_each_gpu"),) * 2,
    ),
    "docs/requests.md": ((_BLOCKS, "test_samples_are_drawn_as_the_page_has_it"),),
    "docs/simulation.md": (
        *((_SIMULATION, "test_the_tutorial_can_be_followed"),) * 2,
        (_BLOCKS, "test_an_engine_is_measured_as_the_page_has_it"),
    ),
    "docs/stores.md": ((_STORES, "test_the_blocks_run_in_their_order"),) * 6,
    "docs/telemetry.md": ((_BLOCKS, "test_a_fleet_has_the_parts_that_pages_give_it"),),
    "docs/tutorials/fastapi.md": (
        (_TUTORIALS, "test_the_service_answers_as_the_page_calls_it"),
        (_TUTORIALS, "test_the_service_answers_in_text_with_the_models_that_the_page_makes"),
    ),
    "docs/tutorials/first-swap.md": ((_TUTORIALS, "test_the_first_swap_goes_as_the_page_says"),),
    "docs/tutorials/policy.md": ((_TUTORIALS, "test_the_policy_is_compared_on_a_trace_in_azures_form"),) * 3,
    "docs/vllm.md": (("backends/vllm/test_example.py", "test_the_fleet_of_the_guide_serves"),),
}


def test_every_block_is_run_by_a_test_or_is_an_excerpt_of_a_file() -> None:
    blocks = Counter(page for page, _ in all_blocks("python"))
    marked = {f"docs/{page.relative_to(DOCS).as_posix()}": len(excerpts(page)) for page in DOCS.rglob("*.md")}
    assert {page: number - marked.get(page, 0) for page, number in blocks.items()} == {
        page: len(RUN_BY.get(page, ())) for page in blocks
    }
    assert RUN_BY.keys() <= blocks.keys()


def test_the_tests_that_are_named_exist() -> None:
    named = {test for tests in RUN_BY.values() for test in tests}
    for file, name in named:
        tree = ast.parse((ROOT / "tests" / file).read_text("utf-8"))
        found = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert name in found, f"{file} has no {name}"
