//! Files that are no plugin, or no longer one. Each is refused before or while it is opened, with one
//! line that says what to do, and the process lives on.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokenrouter::policy::native::{NativePlugin, inspect};
use tokenrouter::policy::plugin::find;
use tokenrouter::policy::store::Store;

use crate::support::{built, library};

/// The error, after checking that it is one line that begins with the path.
fn refused(path: &Path) -> String {
    let error = NativePlugin::load(path, None).unwrap_err().to_string();
    let rest = error.strip_prefix(&format!("plugin `{}`: ", path.display()));
    let rest = rest.unwrap_or_else(|| panic!("does not name the path: {error}")).to_owned();
    assert!(!rest.contains('\n') && rest.len() < 700, "not one short line: {error}");
    rest
}

struct Scratch(tempfile::TempDir);

impl Scratch {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }
    fn path(&self) -> PathBuf {
        self.0.path().join("libplugin.so")
    }
    fn refused(&self, bytes: &[u8]) -> String {
        std::fs::write(self.path(), bytes).unwrap();
        refused(&self.path())
    }
}

fn probe() -> Vec<u8> {
    std::fs::read(library("libprobe.so")).unwrap()
}

fn replace(bytes: &mut [u8], from: &[u8], to: &[u8]) {
    assert_eq!(from.len(), to.len());
    let at = bytes.windows(from.len()).position(|window| window == from);
    let at = at.unwrap_or_else(|| panic!("the library does not hold {}", from.escape_ascii()));
    bytes[at..at + to.len()].copy_from_slice(to);
}

/// The metadata record of a library.
fn record(bytes: &mut [u8]) -> &mut [u8] {
    let magic = b"TOKENROUTER-PLUG\x01\0\0\0";
    let at = bytes.windows(magic.len()).position(|window| window == magic).unwrap();
    &mut bytes[at..]
}

#[test]
fn case_01_what_is_not_a_file() {
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(refused(&dir.path().join("absent.so")), "no such file; build the plugin or correct the path");
    assert_eq!(refused(dir.path()), "is a directory, not a regular file; give the path of the plugin's file");
    assert_eq!(refused(Path::new("/dev/zero")), "is a device, not a regular file; give the path of the plugin's file");
    let pipe = dir.path().join("pipe.so");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    assert_eq!(refused(&pipe), "is a named pipe, not a regular file; give the path of the plugin's file");
    let socket = dir.path().join("socket.so");
    let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    assert_eq!(refused(&socket), "is a socket, not a regular file; give the path of the plugin's file");
    let dangling = dir.path().join("dangling.so");
    std::os::unix::fs::symlink("nowhere.so", &dangling).unwrap();
    assert_eq!(refused(&dangling), "no such file; build the plugin or correct the path");
}

#[test]
fn what_is_too_large() {
    let scratch = Scratch::new();
    // Sparse: nobody reads it.
    std::fs::File::create(scratch.path()).unwrap().set_len((256 << 20) + 1).unwrap();
    assert_eq!(
        refused(&scratch.path()),
        "has 268435457 bytes, more than the 268435456 allowed; strip its debug information"
    );
}

#[test]
fn case_02_what_is_not_elf() {
    let scratch = Scratch::new();
    for (bytes, what) in [
        (&b""[..], "an empty file"),
        (b"hello, I am a policy\n", "some other file"),
        (b"\0asm\x01\0\0\0", "a WebAssembly module"),
        (b"!<arch>\n", "a static library"),
        (b"MZ\x90", "a Windows library"),
    ] {
        let error = scratch.refused(bytes);
        assert!(error.starts_with(&format!("is {what}, not an ELF shared object; ")), "{error}");
    }
}

#[test]
fn case_03_what_is_cut_off() {
    let (scratch, whole) = (Scratch::new(), probe());
    let mut lengths = vec![4, 16, 63, 64, 65, 200, 1000, 4096, 20_000, 100_000, 300_000];
    lengths.extend([whole.len() / 2, whole.len() * 9 / 10, whole.len() - 1]);
    for length in lengths.into_iter().filter(|&length| length < whole.len()) {
        let error = scratch.refused(&whole[..length]);
        let end = format!("the file has {length}; copy or build it again");
        assert!(error.starts_with("is cut off: its ") && error.ends_with(&end), "{length}: {error}");
    }
}

#[test]
fn case_04_what_is_for_another_machine() {
    let scratch = Scratch::new();
    let patched = |at: usize, bytes: &[u8]| {
        let mut file = probe();
        file[at..at + bytes.len()].copy_from_slice(bytes);
        scratch.refused(&file)
    };
    let other: (u16, &str) = if cfg!(target_arch = "x86_64") { (183, "aarch64") } else { (62, "x86_64") };
    assert_eq!(
        patched(18, &other.0.to_le_bytes()),
        format!(
            "is built for {}, this server runs on {}; build the plugin for this server's target",
            other.1,
            std::env::consts::ARCH
        )
    );
    assert_eq!(patched(4, &[1]), "is a 32-bit ELF file; build the plugin for this server's target");
    assert_eq!(patched(5, &[2]), "is a big-endian ELF file; build the plugin for this server's target");
    let remedy = "not a shared object; set crate-type = [\"cdylib\"] in the plugin's Cargo.toml";
    assert_eq!(patched(16, &[1, 0]), format!("is an object file, {remedy}"));
    assert_eq!(patched(16, &[2, 0]), format!("is a program, {remedy}"));
    assert_eq!(patched(16, &[4, 0]), format!("is an ELF file of another type, {remedy}"));
}

/// Damage anywhere in the headers must end in an error or in a plugin, never in a crash of the gate. Only
/// the gate runs: it is what stands before the dynamic linker.
#[test]
fn damaged_headers_are_read_safely() {
    let (scratch, whole) = (Scratch::new(), probe());
    for at in (0..64).chain((64..64 + 56 * 8).step_by(7)) {
        let mut file = whole.clone();
        file[at] ^= 0xff;
        std::fs::write(scratch.path(), &file).unwrap();
        if let Err(error) = inspect(&scratch.path()) {
            assert!(!error.to_string().contains('\n'), "{error}");
        }
    }
}

#[test]
fn case_05_what_is_a_library_but_no_plugin() {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let libc = maps.lines().filter_map(|line| line.split_whitespace().nth(5)).find(|path| path.contains("libc.so"));
    let expected = "is a shared object but not a TokenRouter plugin (no section .tokenrouter); a plugin calls \
                    export_policy! from tokenrouter-plugin-api";
    assert_eq!(refused(Path::new(libc.expect("this test needs a C library that is loaded dynamically"))), expected);
    // A position-independent program is a shared object, too.
    assert_eq!(refused(&library("tokenrouter")), expected);
}

#[test]
fn case_09_what_has_other_metadata() {
    let scratch = Scratch::new();
    let patched = |at: usize, bytes: &[u8]| {
        let mut file = probe();
        record(&mut file)[at..at + bytes.len()].copy_from_slice(bytes);
        scratch.refused(&file)
    };
    assert_eq!(patched(0, b"X"), "section .tokenrouter does not begin with TOKENROUTER-PLUG");
    assert_eq!(
        patched(16, &[2]),
        "plugin metadata has layout 2, this server reads layout 1; rebuild the plugin with tokenrouter-plugin-api 1.0"
    );
    assert_eq!(
        patched(20, &[2]),
        "plugin probe 3.2.1 is built for plugin ABI 2.0, this server provides 1.0; rebuild the plugin with \
         tokenrouter-plugin-api 1.0"
    );
    let newer = "plugin probe 3.2.1 needs plugin ABI 1.7, this server provides 1.0; update the server or rebuild the \
                 plugin with tokenrouter-plugin-api 1.0";
    assert_eq!(patched(24, &[7]), newer);
    assert_eq!(patched(28, &[7]), newer);
    assert_eq!(patched(32, &[0]), "plugin metadata has no readable name; rebuild the plugin");
    // The symbol's name: the dynamic linker says which one is missing.
    let error = patched(160, b"X");
    assert!(error.contains("the dynamic linker refused it") && error.contains("Xokenrouter_plugin_probe"), "{error}");
}

#[test]
fn case_06_what_the_dynamic_linker_cannot_resolve() {
    let scratch = Scratch::new();
    let mut file = probe();
    replace(&mut file, b"\0memcpy\0", b"\0memcpz\0");
    let error = scratch.refused(&file);
    assert!(error.contains("the dynamic linker refused it") && error.contains("memcpz"), "{error}");
    let mut file = probe();
    replace(&mut file, b"libc.so.6\0", b"libz.so.z\0");
    let error = scratch.refused(&file);
    assert!(error.contains("the dynamic linker refused it") && error.contains("libz.so.z"), "{error}");
}

#[test]
fn case_26_links_and_paths_lead_to_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let real = dir.path().join("libreal.so");
    std::fs::copy(library("libprobe.so"), &real).unwrap();
    let (symbolic, hard) = (dir.path().join("symbolic.so"), dir.path().join("hard.so"));
    std::os::unix::fs::symlink(&real, &symbolic).unwrap();
    std::fs::hard_link(&real, &hard).unwrap();
    let around = dir.path().join("../").join(dir.path().file_name().unwrap()).join("libreal.so");
    let hashes =
        [real, symbolic, hard, around].map(|path| NativePlugin::load(&path, None).unwrap().sha256().to_owned());
    assert!(hashes.iter().all(|hash| *hash == hashes[0]));
}

#[test]
fn case_26_what_everybody_may_change() {
    use std::os::unix::fs::PermissionsExt;
    let scratch = Scratch::new();
    std::fs::copy(library("libprobe.so"), scratch.path()).unwrap();
    std::fs::set_permissions(scratch.path(), std::fs::Permissions::from_mode(0o757)).unwrap();
    let expected =
        "may be changed by every user of this machine; take that right away (chmod o-w), or pin it with sha256";
    assert_eq!(refused(&scratch.path()), expected);
    assert!(inspect(&scratch.path()).is_err());
    let hash = NativePlugin::load(&library("libprobe.so"), None).unwrap().sha256().to_owned();
    assert!(NativePlugin::load(&scratch.path(), Some(&hash)).is_ok());
    let path = scratch.path();
    let directory = path.parent().unwrap();

    std::fs::set_permissions(scratch.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let mode = |mode| std::fs::set_permissions(directory, std::fs::Permissions::from_mode(mode)).unwrap();
    mode(0o777);
    assert!(refused(&scratch.path()).contains("where every user of this machine may put another in its place"));
    assert!(NativePlugin::load(&scratch.path(), Some(&hash)).is_ok());
    // Nor where a link to a safe file lies there.
    let link = directory.join("link.so");
    std::os::unix::fs::symlink(library("libprobe.so"), &link).unwrap();
    assert!(refused(&link).contains("where every user of this machine may put another in its place"));
    assert!(NativePlugin::load(&link, Some(&hash)).is_ok());
    // Nobody can replace the file of another.
    mode(0o1777);
    assert!(NativePlugin::load(&scratch.path(), None).is_ok());
    assert!(NativePlugin::load(&link, None).is_ok());
}

#[test]
fn a_pinned_hash_must_match() {
    let path = library("libprobe.so");
    let hash = NativePlugin::load(&path, None).unwrap().sha256().to_owned();
    NativePlugin::load(&path, Some(&hash.to_uppercase())).unwrap();
    let wanted = "0".repeat(64);
    let error = NativePlugin::load(&path, Some(&wanted)).unwrap_err().to_string();
    assert!(error.contains(&format!("has SHA-256 {hash}, the configuration wants {wanted}; ")), "{error}");
    let error = NativePlugin::load(&path, Some("abc")).unwrap_err().to_string();
    assert!(error.contains("sha256 is `abc` in the configuration; give 64 hexadecimal digits"), "{error}");
}

#[test]
fn a_store_opens_a_file_once() {
    let (scratch, mut store) = (Scratch::new(), Store::with_room(2));
    let first = store.load(&library("libprobe.so"), None).unwrap();
    std::fs::write(scratch.path(), probe()).unwrap();
    let copied = store.load(&scratch.path(), Some(&first.sha256)).unwrap();
    assert!(Arc::ptr_eq(&first.policy, &copied.policy) && copied.path == scratch.path());
    let mut refused = |file: &[u8]| {
        std::fs::write(scratch.path(), file).unwrap();
        store.load(&scratch.path(), None).err().expect("it cannot be used").to_string()
    };
    let mut file = probe();
    replace(&mut file, b"\0memcpy\0", b"\0memcpz\0");
    // Opened again it would have another descriptor in the message.
    let error = refused(&file);
    assert!(error.contains("memcpz"), "{error}");
    assert_eq!(refused(&file), error);
    // It is in memory, too, and there is room for two.
    let mut file = probe();
    replace(&mut file, b"libc.so.6\0", b"libz.so.z\0");
    let error = refused(&file);
    assert!(error.contains("2 different native plugins have been loaded since the start"), "{error}");
    store.load(&library("libprobe.so"), None).unwrap();
}

#[test]
fn inspecting_runs_nothing() {
    let (scratch, mut file) = (Scratch::new(), probe());
    // The dynamic linker would refuse it.
    replace(&mut file, b"libc.so.6\0", b"libz.so.z\0");
    std::fs::write(scratch.path(), &file).unwrap();
    let metadata = inspect(&scratch.path()).unwrap();
    assert_eq!((metadata.name.as_str(), metadata.version.as_str()), ("probe", "3.2.1"));
    assert_eq!((metadata.abi.to_string().as_str(), metadata.min_host_minor), ("1.0", 0));
}

#[test]
fn case_26_a_bare_name_is_looked_up_in_order() {
    let empty = tempfile::tempdir().unwrap();
    let dirs = [empty.path().to_owned(), built()];
    assert_eq!(find("rstitch", &dirs).unwrap(), library("librstitch.so"));
    std::fs::write(empty.path().join("librstitch.so"), "mine").unwrap();
    assert_eq!(find("rstitch", &dirs).unwrap(), empty.path().join("librstitch.so"));
    let (a, b) = (empty.path().join("libno_such.so"), built().join("libno_such.so"));
    assert_eq!(
        find("no-such", &dirs).unwrap_err().to_string(),
        format!(
            "plugin `no-such` is in none of these places: {}, {}; build it, or add its directory to plugin_dirs",
            a.display(),
            b.display()
        )
    );
    for name in ["", "a/b", "..", "rstitch.so"] {
        assert!(find(name, &dirs).unwrap_err().to_string().contains("is not a bare name"), "{name}");
    }
    assert!(find("rstitch", &[]).unwrap_err().to_string().contains("plugin_dirs is empty"));
}
