//! `tokenrouter plugin new --wasm`: a policy that is checked as it is, or after `npm run build`.

use std::path::{Path, PathBuf};

use super::args::Language;
use super::new::{Begun, toml_text};

macro_rules! template {
    ($name:literal) => {
        include_str!(concat!("template/", $name))
    };
}

/// What does not depend on the policy is that of our own policy in AssemblyScript.
macro_rules! shared {
    ($name:literal) => {
        include_str!(concat!("../../../../plugins/rstitch/assemblyscript/", $name))
    };
}

/// The files of the policy `name`, which will lie at `to`.
pub fn begin(name: &str, language: Language, to: &Path) -> Begun {
    let filled = |text: &str| {
        let path = toml_text(&to.display().to_string());
        text.replace("@NAME@", name).replace("@PATH@", &path)
    };
    let (files, next): (Vec<(PathBuf, String)>, _) = match language {
        Language::Wat => (
            vec![
                (format!("{name}.wat").into(), filled(template!("wat/policy.wat.in"))),
                ("README.md".into(), filled(template!("wat/README.md.in"))),
            ],
            format!("  tokenrouter plugin check {name}.wat"),
        ),
        Language::AssemblyScript => (
            [
                ("README.md", filled(template!("assemblyscript/README.md.in"))),
                ("package.json", filled(template!("assemblyscript/package.json.in"))),
                ("policy.json", filled(template!("assemblyscript/policy.json.in"))),
                ("assembly/index.ts", filled(template!("assemblyscript/index.ts.in"))),
                ("assembly/block.ts", shared!("assembly/block.ts").to_owned()),
                ("assembly/tsconfig.json", shared!("assembly/tsconfig.json").to_owned()),
                ("section.mjs", shared!("section.mjs").to_owned()),
                (".gitignore", "/build\n/node_modules\n".to_owned()),
            ]
            .map(|(path, text)| (path.into(), text))
            .into(),
            "  npm install && npm run build\n  npm test".to_owned(),
        ),
    };
    Begun { files, with: "", next }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_left_to_fill_in() {
        for language in [Language::Wat, Language::AssemblyScript] {
            let begun = begin("my-policy", language, Path::new("/a \"b\""));
            for (path, text) in &begun.files {
                assert!(!text.contains("@NAME") && !text.contains("@PATH"), "{}: {text}", path.display());
            }
            let readme = &begun.files.iter().find(|(path, _)| path == Path::new("README.md")).unwrap().1;
            assert!(readme.lines().count() <= 25 && readme.contains("plugin = \"/a \\\"b\\\"/"), "{readme}");
        }
    }
}
