//! Plugins, good and hostile: what loads, what is refused and how, and what a failing hook does.
//!
//! What hostile and broken plugins may bring is numbered; a test `case_NN_…` stands for each, wherever it lies:
//!
//! | case | what | where |
//! | --- | --- | --- |
//! | 01–06 | no file, no library, a damaged one, one for another machine, no plugin, unresolved symbols | `files` |
//! | 07–09 | another layout; an older, a newer, another major version of the contract | `versions`, `files` |
//! | 10–11 | a hook panics; a plugin ends the process or could not unwind | `hooks`, `serving`, `process` |
//! | 12–14 | answers of the wrong length, unknown destinations, signals that are no numbers | `wasm`, `serving` |
//! | 15–16 | hooks without end; modules that never start | `serving`, `wasm` |
//! | 17–18 | memory bombs and leaks | `wasm`, `serving` |
//! | 19–23 | imports, compile bombs, traps, other features, damaged modules | `wasm`, `serving` |
//! | 24 | floating-point state, NaN payloads | `serving`, `wasm` |
//! | 25–27 | one name twice, links and names, files overwritten | `hooks`, `files` |
//! | 28 | settings and weights that are wrong | `settings` |
//! | also | empty and too large batches, wrong plans, floods in the log, threads of a plugin | `hooks`, `serving`, `wasm` |

mod files;
mod hooks;
mod process;
mod serving;
mod settings;
mod support;
mod versions;
mod wasm;
