//! `tokenrouter plugin new`: a policy that builds as it is, by default a crate.
//!
//! The plugin API is in no registry. A copy of its sources, which are part of this program, makes the crate
//! independent of where this server's repository is.

use std::path::{Path, PathBuf};

use super::args::New;
use super::new_wasm;
use crate::cli::output::{Failure, unwritten, write_stdout};

/// A crate by these names could not be built: they are its dependencies' and the language's.
const TAKEN: [&str; 12] = [
    "abi_stable",
    "alloc",
    "core",
    "proc_macro",
    "self",
    "serde",
    "serde_json",
    "std",
    "super",
    "test",
    "tokenrouter",
    "tokenrouter_plugin_api",
];
/// The metadata of a plugin has room for a symbol with the crate's name.
const LONGEST: usize = 40;

const API_VERSION: &str = "1.0.0";
const ABI_STABLE: &str = "0.11.3";

macro_rules! api_files {
    ($($name:literal),* $(,)?) => {
        [$(($name, include_str!(concat!("../../../../plugin-api/src/", $name)))),*]
    };
}

/// The plugin API without its loading side.
const API_FILES: [(&str, &str); 17] = api_files![
    "abi/glue.rs",
    "abi/guard.rs",
    "abi/metadata.rs",
    "abi/mod.rs",
    "abi/net.rs",
    "abi/raw.rs",
    "context.rs",
    "decision.rs",
    "lib.rs",
    "net.rs",
    "per_request.rs",
    "policy.rs",
    "random.rs",
    "requirements.rs",
    "roles.rs",
    "views.rs",
    "weights.rs",
];

const CARGO: &str = include_str!("template/Cargo.toml.in");
const API_CARGO: &str = include_str!("template/api.toml.in");
const LIB: &str = include_str!("template/lib.rs.in");
const README: &str = include_str!("template/README.md.in");

/// A policy that is begun.
pub struct Begun {
    /// Paths within its directory.
    pub files: Vec<(PathBuf, String)>,
    /// What comes with it, for a sentence.
    pub with: &'static str,
    /// Commands to go on with, one a line.
    pub next: String,
}

pub fn run(arguments: &New) -> Result<(), Failure> {
    let name = &arguments.name;
    check_name(name).map_err(Failure::input)?;
    if let Some(stray) = &arguments.stray {
        return Err(Failure::input(format!("`{stray}` after --wasm: write the language as --wasm={stray}")));
    }
    let api = arguments.api.as_deref().map(own_api).transpose().map_err(Failure::input)?;
    let named = |path: &Path, e: std::io::Error| {
        Failure::input(format!("{}: {}", path.display(), unwritten(&e, "give another --dir")))
    };
    std::fs::create_dir_all(&arguments.dir).map_err(|e| named(&arguments.dir, e))?;
    let parent = arguments.dir.canonicalize().map_err(|e| named(&arguments.dir, e))?;
    let to = parent.join(name);
    if to.symlink_metadata().is_ok() {
        let exists = "exists already; choose another name or --dir";
        return Err(Failure::input(format!("{}: {exists}", to.display())));
    }
    let begun = match arguments.wasm {
        Some(language) => new_wasm::begin(name, language, &to),
        None => begin(name, &to, api.as_deref()),
    };
    // All of the policy or nothing: it gets its name when it is complete.
    let made = tempfile::Builder::new().prefix(".new-policy-").tempdir_in(&parent).map_err(|e| named(&parent, e))?;
    for (path, text) in &begun.files {
        let path = made.path().join(path);
        let written = path.parent().map_or(Ok(()), std::fs::create_dir_all).and_then(|()| std::fs::write(&path, text));
        written.map_err(|e| named(&path, e))?;
    }
    // A temporary directory is its owner's alone; this one is as any other.
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(made.path(), open).map_err(|e| named(made.path(), e))?;
    std::fs::rename(made.path(), &to).map_err(|e| named(&to, e))?;
    let (to, Begun { with, next, .. }) = (to.display(), begun);
    write_stdout(&format!(
        "made {to}{with}\n\nNext, in this directory:\n{next}\n\nREADME.md has the route that serves it.\n"
    ))
}

/// The crate `name`, which will lie at `to`.
fn begin(name: &str, to: &Path, api: Option<&Path>) -> Begun {
    let library = library(name);
    Begun {
        files: files(name, to, api),
        with: if api.is_some() { "" } else { ", with a copy of the plugin API" },
        next: format!("  cargo test\n  cargo build --release\n  tokenrouter plugin check target/release/{library}"),
    }
}

fn library(name: &str) -> String {
    format!("lib{}.so", name.replace('-', "_"))
}

fn check_name(name: &str) -> Result<(), String> {
    let fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '_';
    let refuse = |why: &str| Err(format!("`{name}` {why}"));
    if !name.starts_with(|c: char| c.is_ascii_lowercase()) || !name.chars().all(fits) {
        return refuse("is no name for a policy; begin with a lower-case letter, go on with those, digits, `-` or `_`");
    }
    if name.len() > LONGEST {
        return refuse(&format!("has {} characters; a policy's name has at most {LONGEST}", name.len()));
    }
    if TAKEN.contains(&name.replace('-', "_").as_str()) {
        return refuse("is the name of something that a policy is built with; choose another");
    }
    Ok(())
}

/// The directory of a plugin API to depend on.
fn own_api(directory: &Path) -> Result<PathBuf, String> {
    let whole = directory.canonicalize().map_err(|e| format!("--api {}: {e}", directory.display()))?;
    let manifest = std::fs::read_to_string(whole.join("Cargo.toml")).unwrap_or_default();
    if !manifest.lines().any(|line| line.trim() == "name = \"tokenrouter-plugin-api\"") {
        let what = "is not the plugin API; give the directory plugin-api of the server's repository";
        return Err(format!("--api {}: {what}", directory.display()));
    }
    Ok(whole)
}

/// The files of the crate `name`, which will lie at `to`.
fn files(name: &str, to: &Path, api: Option<&Path>) -> Vec<(PathBuf, String)> {
    let path = api.map_or("plugin-api".into(), |api| api.display().to_string());
    let note = match api {
        Some(_) => format!("The plugin API is that of `{path}`."),
        None => format!(
            "`plugin-api/` is a copy of the plugin API's sources, version {API_VERSION}, from the server that made this \
             crate: leave it\nas it is. For another version, let `tokenrouter plugin new` of that server make a crate and \
             take its `plugin-api/`."
        ),
    };
    let filled = |text: &str| {
        text.replace("@NAME@", name)
            .replace("@LIBRARY@", &library(name))
            .replace("@API_NOTE@", &note)
            .replace("@API@", &toml_text(&path))
            .replace("@PATH@", &toml_text(&to.display().to_string()))
            .replace("@VERSION@", API_VERSION)
            .replace("@ABI_STABLE@", ABI_STABLE)
    };
    let mut files: Vec<(PathBuf, String)> = [
        ("Cargo.toml", filled(CARGO)),
        ("README.md", filled(README)),
        ("src/lib.rs", filled(LIB)),
        (".gitignore", "/target\n".into()),
    ]
    .map(|(path, text)| (path.into(), text))
    .into();
    if api.is_none() {
        files.push(("plugin-api/Cargo.toml".into(), filled(API_CARGO)));
        let copies = API_FILES.iter().map(|(path, text)| (Path::new("plugin-api/src").join(path), text.to_string()));
        files.extend(copies);
    }
    files
}

/// The inside of a basic string of TOML.
pub fn toml_text(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn repository() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
    }

    #[test]
    fn names() {
        assert_eq!(check_name("my-policy_2"), Ok(()));
        for (name, part) in [
            ("", "is no name"),
            ("2nd", "begin with a lower-case letter"),
            ("My", "is no name"),
            ("a/b", "is no name"),
            ("../a", "is no name"),
            ("serde-json", "choose another"),
            (&"a".repeat(41), "has 41 characters"),
        ] {
            let error = check_name(name).unwrap_err();
            assert!(error.starts_with(&format!("`{name}`")) && error.contains(part), "{error}");
        }
    }

    #[test]
    fn the_copy_is_the_whole_api() {
        let source = repository().join("plugin-api/src");
        let list = |directory: &str| {
            let entries = std::fs::read_dir(source.join(directory)).unwrap();
            let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
            let files = names.filter(|name| name.ends_with(".rs"));
            files.map(|name| Path::new(directory).join(name).display().to_string()).collect::<Vec<_>>()
        };
        let mut there = [list(""), list("abi")].concat();
        there.sort();
        let mut copied = API_FILES.map(|(name, _)| name.to_owned());
        copied.sort();
        assert_eq!(copied.as_slice(), there);
        let read = |file: &str| std::fs::read_to_string(repository().join(file)).unwrap();
        assert!(read("plugin-api/Cargo.toml").contains(&format!("\nversion = \"{API_VERSION}\"\n")));
        assert!(read("Cargo.toml").contains(&format!("\nabi_stable = {{ version = \"{ABI_STABLE}\", ")));
    }

    #[test]
    fn nothing_is_left_to_fill_in() {
        for api in [None, Some(Path::new("/a \"b\""))] {
            let files = files("my-policy", Path::new("/tmp/my-policy"), api);
            assert_eq!(files.len(), if api.is_some() { 4 } else { 5 + API_FILES.len() });
            for (path, text) in files.iter().filter(|(path, _)| !path.starts_with("plugin-api/src")) {
                assert!(!text.contains('@'), "{}: {text}", path.display());
            }
            let manifest: toml::Table = files[0].1.parse().unwrap();
            let expected = api.map_or("plugin-api", |_| "/a \"b\"");
            let given = &manifest["dependencies"]["tokenrouter-plugin-api"]["path"];
            assert_eq!(given.as_str(), Some(expected));
        }
    }

    #[test]
    fn only_the_plugin_api_is_depended_on() {
        assert!(own_api(&repository().join("plugin-api")).is_ok());
        assert!(own_api(&repository().join("host")).unwrap_err().contains("is not the plugin API"));
        assert!(own_api(&repository().join("missing")).unwrap_err().starts_with("--api "));
    }
}
