//! Finding the CUDA libraries before cudarc does, which panics when one is missing.
//!
//! cudarc opens a library by bare names. What the loader finds by one of them is left to it. Any other
//! library is opened here by its path first: glibc then takes a bare name equal to its soname for it.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use libloading::os::unix::{Library as Handle, RTLD_GLOBAL, RTLD_NOW};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Library {
    Driver,
    Nvrtc,
}

impl Library {
    /// cudarc's name of it.
    fn stem(self) -> &'static str {
        match self {
            Self::Driver => "cuda",
            Self::Nvrtc => "nvrtc",
        }
    }

    /// Sonames that are good, best first.
    fn names(self) -> &'static [&'static str] {
        match self {
            Self::Driver => &["libcuda.so.1"],
            Self::Nvrtc => &["libnvrtc.so.13", "libnvrtc.so.12"],
        }
    }

    /// Beginning of the names of libraries that it opens by bare names itself.
    fn companion(self) -> Option<&'static str> {
        (self == Self::Nvrtc).then_some("libnvrtc-builtins.so.")
    }

    fn origin(self) -> &'static str {
        match self {
            Self::Driver => "install the NVIDIA driver",
            Self::Nvrtc => "install the CUDA toolkit or set CUDA_HOME or LD_LIBRARY_PATH",
        }
    }
}

/// A library that could not be loaded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{} is missing: {reason}; {}", library.names()[0], library.origin())]
pub struct MissingLibrary {
    pub library: Library,
    /// Where it was looked for, and what was wrong with what was found there.
    pub reason: String,
}

/// Load both.
pub fn find() -> Result<(), MissingLibrary> {
    [Library::Driver, Library::Nvrtc].into_iter().try_for_each(require)
}

/// Load one library for the rest of the process, so that cudarc's functions of it do not panic.
pub fn require(library: Library) -> Result<(), MissingLibrary> {
    if opens_for_cudarc(library) {
        return Ok(());
    }
    let directories = directories(|name| std::env::var_os(name));
    let mut broken = String::new();
    for path in candidates(library, &directories) {
        let companions = library.companion().map_or(Vec::new(), |start| beside(&path, start));
        match companions.iter().chain([&path]).try_for_each(|path| open(path)) {
            Ok(()) if opens_for_cudarc(library) => return Ok(()),
            Ok(()) => broken += &format!(" ({} is there, but its soname is another)", path.display()),
            Err(error) => broken += &format!(" ({} is there, but: {error})", path.display()),
        }
    }
    Err(MissingLibrary { library, reason: looked(library, &directories) + &broken })
}

/// Open for good what cudarc is going to open, by its names in its order.
fn opens_for_cudarc(library: Library) -> bool {
    cudarc::get_lib_name_candidates(library.stem()).iter().any(|name| open(Path::new(name)).is_ok())
}

/// Open for good.
fn open(path: &Path) -> Result<(), libloading::Error> {
    // SAFETY: the initialisers of NVIDIA's libraries may run at any time, on any thread.
    let handle = unsafe { Handle::open(Some(path), RTLD_NOW | RTLD_GLOBAL)? };
    std::mem::forget(handle);
    Ok(())
}

/// Where libraries are looked for besides the loader's own paths.
fn directories(variable: impl Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
    let path = |name: &str| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let mut found: Vec<PathBuf> =
        variable("LD_LIBRARY_PATH").iter().flat_map(std::env::split_paths).filter(|p| p.is_absolute()).collect();
    found.extend(["CUDA_HOME", "CUDA_PATH"].iter().filter_map(|name| path(name)).map(|home| home.join("lib64")));
    found.extend(["/usr/local/cuda/lib64", "/usr/local/nvidia/lib64"].map(PathBuf::from));
    let environments = ["VIRTUAL_ENV", "CONDA_PREFIX"].iter().filter_map(|name| path(name));
    for prefix in environments.chain(["/usr/local".into(), "/usr".into()]) {
        for python in list(&prefix.join("lib"), "python3") {
            for packages in ["site-packages", "dist-packages"] {
                // The packages of CUDA 13 share `cu13/`; before, each had its own.
                let vendor = list(&python.join(packages).join("nvidia"), "");
                found.extend(vendor.into_iter().map(|package| package.join("lib")).filter(|lib| lib.is_dir()));
            }
        }
    }
    found
}

/// The paths in `directory` whose names begin with `start`, sorted; none if it cannot be read.
fn list(directory: &Path, start: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let mut paths: Vec<PathBuf> =
        entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(start)).map(|e| e.path()).collect();
    paths.sort();
    paths
}

/// A newer version anywhere comes before an older one.
fn candidates(library: Library, directories: &[PathBuf]) -> Vec<PathBuf> {
    let paths = |name| directories.iter().map(move |directory| directory.join(name));
    library.names().iter().flat_map(paths).filter(|path| path.is_file()).collect()
}

fn beside(path: &Path, start: &str) -> Vec<PathBuf> {
    path.parent().map_or(Vec::new(), |directory| list(directory, start))
}

fn looked(library: Library, directories: &[PathBuf]) -> String {
    let directories: Vec<_> = directories.iter().map(|directory| directory.display().to_string()).collect();
    format!(
        "looked for {} on the loader's paths, in Python's nvidia packages and in {}",
        library.names().join(" or "),
        directories.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn touch(path: &Path) -> PathBuf {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, "").unwrap();
        path.to_path_buf()
    }

    #[test]
    fn the_environment_says_where_to_look_first() {
        let directories = directories(|name| match name {
            "LD_LIBRARY_PATH" => Some("/a:relative:/b".into()),
            "CUDA_HOME" => Some("/opt/cuda".into()),
            "CUDA_PATH" => Some("".into()),
            _ => None,
        });
        let expected = ["/a", "/b", "/opt/cuda/lib64", "/usr/local/cuda/lib64", "/usr/local/nvidia/lib64"];
        assert_eq!(directories[..5], expected.map(PathBuf::from));
    }

    #[test]
    fn packages_of_a_virtual_environment_are_searched_and_13_wins() {
        let home = tempfile::tempdir().unwrap();
        let packages = home.path().join("lib/python3.12/site-packages/nvidia");
        let old = touch(&packages.join("a_nvrtc/lib/libnvrtc.so.12"));
        let compiler = touch(&packages.join("cu13/lib/libnvrtc.so.13"));
        touch(&packages.join("cu13/lib/libnvrtc-builtins.alt.so.13.0"));
        let builtins = touch(&packages.join("cu13/lib/libnvrtc-builtins.so.13.0"));
        let found = directories(|name| (name == "VIRTUAL_ENV").then(|| home.path().into()));
        let inside: Vec<PathBuf> = found.into_iter().filter(|d| d.starts_with(home.path())).collect();
        assert_eq!(inside, [packages.join("a_nvrtc/lib"), packages.join("cu13/lib")]);
        assert_eq!(candidates(Library::Nvrtc, &inside), [compiler.clone(), old]);
        assert!(candidates(Library::Driver, &inside).is_empty());
        assert_eq!(beside(&compiler, "libnvrtc-builtins.so."), [builtins]);
    }

    #[test]
    fn a_missing_library_is_named_in_one_sentence() {
        let directories = ["/a".into(), "/b".into()];
        let reason = looked(Library::Nvrtc, &directories);
        assert_eq!(
            MissingLibrary { library: Library::Nvrtc, reason }.to_string(),
            "libnvrtc.so.13 is missing: looked for libnvrtc.so.13 or libnvrtc.so.12 on the loader's paths, in \
             Python's nvidia packages and in /a, /b; install the CUDA toolkit or set CUDA_HOME or LD_LIBRARY_PATH"
        );
    }

    #[test]
    fn cudarc_tries_the_names_that_are_looked_for() {
        for library in [Library::Driver, Library::Nvrtc] {
            let tried = cudarc::get_lib_name_candidates(library.stem());
            for name in library.names() {
                assert!(tried.iter().any(|tried| tried == name), "{name}");
            }
        }
    }
}
