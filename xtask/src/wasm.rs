//! Policies in WebAssembly text: `plugins/NAME/POLICY.wat` becomes `POLICY.wasm` beside the server.

use std::path::Path;

use anyhow::{Context, Result};

pub fn translate(plugins: &Path, target: &Path) -> Result<()> {
    let list = |directory: &Path| -> Result<Vec<_>> {
        let entries = std::fs::read_dir(directory).with_context(|| format!("cannot list {}", directory.display()))?;
        Ok(entries.collect::<Result<Vec<_>, _>>()?)
    };
    for plugin in list(plugins)? {
        if !plugin.file_type()?.is_dir() {
            continue;
        }
        for file in list(&plugin.path())? {
            let source = file.path();
            if source.extension().is_none_or(|extension| extension != "wat") {
                continue;
            }
            let module = wat::parse_file(&source)?;
            let built = target.join(file.file_name()).with_extension("wasm");
            std::fs::write(&built, module).with_context(|| format!("cannot write {}", built.display()))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #[test]
    fn our_own_policy_is_translated() {
        let target = tempfile::tempdir().unwrap();
        let plugins = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("plugins");
        super::translate(&plugins, target.path()).unwrap();
        let module = std::fs::read(target.path().join("rstitch.wasm")).unwrap();
        assert!(module.starts_with(b"\0asm\x01\0\0\0"));
    }
}
