//! The CUDA sources of this crate, in `kernels/cuda`. A new one is one line here.

macro_rules! sources {
    ($($name:literal),* $(,)?) => { &[$(($name, include_str!(concat!("../../cuda/", $name)))),*] };
}

/// Every program: (file name, text).
pub const SOURCES: &[(&str, &str)] = sources![
    "attention.cu",
    "layers.cu",
    "linear_rows.cu",
    "linear_tiled.cu",
    "linear_wgmma.cu",
    "linear_wide.cu",
    "nets.cu",
    "sampling.cu"
];

/// What programs include: (file name, text).
pub const HEADERS: &[(&str, &str)] = sources!["common.cuh", "heads.cuh", "linear.cuh", "pages.cuh"];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_is_listed() {
        let directory = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("cuda");
        let mut files: Vec<String> = std::fs::read_dir(directory)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        files.sort();
        let mut listed: Vec<&str> = SOURCES.iter().chain(HEADERS).map(|(name, _)| *name).collect();
        listed.sort();
        assert_eq!(files, listed);
        assert!(SOURCES.iter().all(|(name, _)| name.ends_with(".cu")));
    }
}
