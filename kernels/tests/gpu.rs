//! The GPU layer on a device. Without one each test passes and says why it did nothing, unless
//! `TOKENROUTER_REQUIRE_GPU` is set.

// Reason: enqueueing work is unsafe.
#![allow(unsafe_code)]
#![allow(clippy::unwrap_used)]

use tokenrouter_kernels::gpu::{
    ALIGNMENT, Arena, Args, Device, DevicePtr, Event, Function, GpuError, HEADERS, Launch, Library, Module, Partition,
    Pinned, Pod, Priority, Program, Stream, compile_cubin, launch, libraries,
};

const SOURCE: &str = r#"
#include "common.cuh"
extern "C" __global__ void add(u32* y, const u32* x, u32 n, VALUE value, float scale, u64 wide) {
    wait_for_previous();
    let_next_start();
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = (u32)((float)((int)x[i] + value) * scale) + (u32)(wide >> 40);
}
extern "C" __global__ void reverse(u32* y) {
    extern __shared__ u32 shared[];
    shared[threadIdx.x * 64] = y[threadIdx.x];
    __syncthreads();
    y[threadIdx.x] = shared[(blockDim.x - 1 - threadIdx.x) * 64];
}
extern "C" __global__ void fault(u32* y) { y[1ull << 40] = 1; }
"#;

fn program(defines: &[String]) -> Program<'_> {
    Program { name: "test.cu", source: SOURCE, headers: HEADERS, defines, arch_suffix: "" }
}

struct Gpu {
    device: Device,
    stream: Stream,
    arena: Arena,
}

impl Gpu {
    /// `None`, with the reason printed, where there is no device.
    fn open() -> Option<Self> {
        let device = libraries::find().map_err(GpuError::from).and_then(|()| Device::open(0));
        let device = match device {
            Err(reason) if std::env::var_os("TOKENROUTER_REQUIRE_GPU").is_none() => {
                eprintln!("skipped: {reason}");
                return None;
            }
            device => device.unwrap(),
        };
        let stream = Stream::new(&device, Priority::High).unwrap();
        let arena = Arena::new(&device, 256 << 20).unwrap();
        Some(Self { device, stream, arena })
    }

    fn module(&self) -> Module {
        let module = Module::compile(&self.device, &program(&["VALUE=int".into()]), None).unwrap();
        assert_eq!(module.log(), "");
        module
    }

    fn upload<T: Pod>(&mut self, values: &[T]) -> DevicePtr {
        let mut host = Pinned::new(&self.device, values.len()).unwrap();
        host.copy_from_slice(values);
        let at = self.arena.alloc(host.bytes()).unwrap();
        // SAFETY: as large as `host`, which lives until the copy is done.
        unsafe { self.stream.upload_async(at, &host, host.bytes()) }.unwrap();
        self.stream.synchronize().unwrap();
        at
    }

    fn download<T: Pod>(&self, from: DevicePtr, len: usize) -> Vec<T> {
        let mut host = Pinned::new(&self.device, len).unwrap();
        let bytes = host.bytes();
        // SAFETY: callers ask for what they uploaded; `host` lives until the copy is done.
        unsafe { self.stream.download_async(&mut host, from, bytes) }.unwrap();
        self.stream.synchronize().unwrap();
        host.to_vec()
    }
}

/// A fixed sequence in [-1, 1).
fn noise(len: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        (state >> 8) as f32 / (1u32 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

#[test]
fn these_kernels_compile() {
    if let Err(missing) = libraries::require(Library::Nvrtc) {
        eprintln!("skipped: {missing}");
        return;
    }
    for arch in ["sm_80", "sm_90"] {
        assert_eq!(compile_cubin(arch, &program(&["VALUE=int".into()])).unwrap().log, "");
    }
}

#[test]
fn the_device_describes_itself() {
    let Some(gpu) = Gpu::open() else { return };
    let device = &gpu.device;
    let (free, total) = device.memory().unwrap();
    eprintln!("{device:?}: {free} of {total} bytes free");
    assert!(!device.name().is_empty() && device.capability() >= (8, 0) && device.multiprocessors() > 0);
    assert!(device.shared_memory_limit() >= 96 << 10 && device.l2_bytes() > 1 << 20 && free <= total);
    let count = Device::count().unwrap();
    let error = Device::open(count).unwrap_err();
    assert!(matches!(error, GpuError::NoDevice { ordinal, count: c } if ordinal == count && c == count), "{error}");
}

#[test]
fn what_is_uploaded_copied_and_filled_comes_back() {
    let Some(mut gpu) = Gpu::open() else { return };
    let values = noise(100_003, 1);
    let first = gpu.upload(&values);
    let second = gpu.arena.alloc(4 * values.len()).unwrap();
    assert!(first.0.is_multiple_of(ALIGNMENT as u64) && second.0 >= first.0 + 4 * values.len() as u64);
    // SAFETY: both are as large as `values`.
    unsafe {
        gpu.stream.copy_async(second, first, 4 * values.len()).unwrap();
        gpu.stream.fill_u32_async(first, 0xdead_beef, 1000).unwrap();
        gpu.stream.fill_u8_async(first.offset(4000), 7, 400).unwrap();
    }
    assert_eq!(gpu.download::<f32>(second, values.len()), values);
    let filled: Vec<u32> = gpu.download(first, 1101);
    assert!(filled[..1000].iter().all(|v| *v == 0xdead_beef) && filled[1000..1100].iter().all(|v| *v == 0x0707_0707));
    assert_eq!(filled[1100], values[1100].to_bits());
}

#[test]
fn too_large_an_arena_gives_the_numbers() {
    let Some(gpu) = Gpu::open() else { return };
    let error = Arena::new(&gpu.device, 1 << 45).unwrap_err();
    assert!(matches!(error, GpuError::OutOfMemory { wanted, free } if wanted == 1 << 45 && free > 0), "{error}");
    assert!(!error.is_fatal());
    gpu.stream.synchronize().unwrap();
}

/// `add` from one buffer to the other and back, each launch overlapping with the one before.
///
/// # Safety
/// Both hold `n` words.
unsafe fn ping_pong(
    gpu: &Gpu,
    add: &Function,
    (a, b): (DevicePtr, DevicePtr),
    n: u32,
    overlap: bool,
) -> Result<(), GpuError> {
    let config = Launch { grid: [n.div_ceil(128), 1, 1], block: 128, cluster: 1, shared: 0, overlap };
    for (to, from) in [(b, a), (a, b)].into_iter().cycle().take(10) {
        let args = Args::new().ptr(to).ptr(from).u32(n).value(&-2i32).f32(1.0).u64(5 << 40);
        // SAFETY: the caller's.
        unsafe { launch(add, &config, &gpu.stream, args)? };
    }
    Ok(())
}

#[test]
fn kernels_run_in_order_eagerly_and_in_a_graph() {
    let Some(mut gpu) = Gpu::open() else { return };
    let add = gpu.module().function("add").unwrap();
    let attributes = add.attributes().unwrap();
    assert!(attributes.registers > 0 && attributes.local == 0, "{attributes:?}");
    let start: Vec<u32> = (0..300_001).map(|i| i + 2).collect();
    let n = start.len() as u32;
    let buffers = (gpu.upload(&start), gpu.upload(&start));
    let mut total = 0;
    for overlap in [false, true] {
        // SAFETY: both buffers hold `n` words, also for the graph.
        unsafe {
            ping_pong(&gpu, &add, buffers, n, overlap).unwrap();
            let graph = gpu.stream.capture(|| ping_pong(&gpu, &add, buffers, n, overlap)).unwrap();
            assert_eq!(graph.nodes(), 10);
            graph.upload(&gpu.stream).unwrap();
            graph.launch(&gpu.stream).unwrap();
            graph.launch(&gpu.stream).unwrap();
        }
        total += 3 * 10 * 3;
        let expected: Vec<u32> = start.iter().map(|v| v + total).collect();
        assert_eq!(gpu.download::<u32>(buffers.0, start.len()), expected, "overlap {overlap}");
    }
}

#[test]
fn a_capture_that_fails_leaves_the_stream_usable() {
    let Some(mut gpu) = Gpu::open() else { return };
    let at = gpu.upload(&[1u32]);
    // SAFETY: one word.
    let fill = |value| unsafe { gpu.stream.fill_u32_async(at, value, 1) };
    let failed = gpu.stream.capture(|| {
        fill(2)?;
        Err(GpuError::OldDriver(1, 2))
    });
    assert!(matches!(failed, Err(GpuError::OldDriver(1, 2))));
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let _ = gpu.stream.capture(|| panic!("inside a capture"));
    }));
    assert!(panicked.is_err());
    assert!(gpu.stream.capture(|| gpu.stream.synchronize()).is_err(), "a capture cannot wait");
    assert_eq!(gpu.download::<u32>(at, 1), [1], "nothing of a failed capture ran");
    let graph = gpu.stream.capture(|| fill(3)).unwrap();
    // SAFETY: the word is still there.
    unsafe { graph.launch(&gpu.stream) }.unwrap();
    assert_eq!(gpu.download::<u32>(at, 1), [3]);
}

#[test]
fn a_kernel_gets_more_than_48_kib_of_shared_memory() {
    let Some(mut gpu) = Gpu::open() else { return };
    let reverse = gpu.module().function("reverse").unwrap();
    let values: Vec<u32> = (0..256).collect();
    let at = gpu.upload(&values);
    let config = Launch { grid: [1; 3], block: 256, shared: 256 * 64 * 4, cluster: 1, overlap: false };
    // SAFETY: one word for each thread.
    let run = || unsafe { launch(&reverse, &config, &gpu.stream, Args::new().ptr(at)) };
    let refused = run().unwrap_err();
    assert!(!refused.is_fatal(), "{refused}");
    reverse.set_max_dynamic_shared(config.shared).unwrap();
    run().unwrap();
    assert!(gpu.download::<u32>(at, 256).into_iter().eq((0..256).rev()));
}

#[test]
fn events_order_streams_and_tell_the_time() {
    let Some(mut gpu) = Gpu::open() else { return };
    let bytes = 64 << 20;
    let at = gpu.arena.alloc(bytes).unwrap();
    let other = Stream::new(&gpu.device, Priority::Low).unwrap();
    let (start, end) = (Event::new(&gpu.device).unwrap(), Event::new(&gpu.device).unwrap());
    start.record(&gpu.stream).unwrap();
    // SAFETY: as large as asked for.
    unsafe {
        gpu.stream.fill_u8_async(at, 1, bytes).unwrap();
        end.record(&gpu.stream).unwrap();
        other.wait_for(&end).unwrap();
        other.fill_u8_async(at, 2, bytes).unwrap();
    }
    other.synchronize().unwrap();
    let ms = Event::elapsed_ms(&start, &end).unwrap();
    // 64 MiB at less than 20 TB/s; how much less depends on what else the device does.
    assert!(ms > 0.003, "{ms}");
    assert!(gpu.download::<u8>(at, bytes).iter().all(|v| *v == 2));
}

#[test]
fn compiled_kernels_are_cached_and_a_damaged_file_is_made_anew() {
    let Some(gpu) = Gpu::open() else { return };
    let home = tempfile::tempdir().unwrap();
    let defines = ["VALUE=int".to_owned()];
    let compile = |directory| Module::compile(&gpu.device, &program(&defines), Some(directory)).unwrap();
    assert!(!compile(home.path()).cached());
    let cached = compile(home.path());
    assert!(cached.cached());
    cached.function("add").unwrap();
    let error = cached.function("nothing").unwrap_err();
    assert!(matches!(&error, GpuError::NoFunction { function, .. } if function == "nothing"), "{error}");
    let file = std::fs::read_dir(home.path()).unwrap().next().unwrap().unwrap().path();
    let mut bytes = std::fs::read(&file).unwrap();
    bytes[100] ^= 1;
    std::fs::write(&file, bytes).unwrap();
    assert!(!compile(home.path()).cached());
    assert!(compile(home.path()).cached());
    assert!(!compile(&file.join("not-a-directory")).cached());
}

/// The fault ends the context of the whole process: it happens in another one.
#[test]
fn a_kernel_that_faults_is_a_fatal_error() {
    const CHILD: &str = "TOKENROUTER_TEST_FAULT";
    let Some(mut gpu) = Gpu::open() else { return };
    if std::env::var_os(CHILD).is_none() {
        let child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "a_kernel_that_faults_is_a_fatal_error", "--nocapture"])
            .env(CHILD, "1")
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&child.stderr);
        assert!(child.status.success() && text.contains("the fault came out"), "{text}");
        return;
    }
    let fault = gpu.module().function("fault").unwrap();
    let at = gpu.upload(&[0u32]);
    let config = Launch { grid: [1; 3], block: 1, cluster: 1, shared: 0, overlap: false };
    // SAFETY: none; that is the test. The address is outside of all allocations.
    unsafe { launch(&fault, &config, &gpu.stream, Args::new().ptr(at)) }.unwrap();
    let error = gpu.stream.synchronize().unwrap_err();
    assert!(error.is_fatal(), "{error}");
    let later = gpu.device.memory().and_then(|_| Arena::new(&gpu.device, 4096)).unwrap_err();
    assert!(later.is_fatal(), "{later}");
    eprintln!("the fault came out: {error}");
}

#[test]
fn parts_share_out_the_multiprocessors() {
    let Some(mut gpu) = Gpu::open() else { return };
    let all = gpu.device.multiprocessors();
    let part = |reserved: &[u32], part| Device::open_part(0, Some(&Partition { reserved: reserved.to_vec(), part }));
    let counts: Vec<u32> = (0..3).map(|index| part(&[16, 24], index).unwrap().multiprocessors()).collect();
    assert_eq!(counts.iter().sum::<u32>(), all, "{counts:?}");
    assert!(counts[0] >= 16 && counts[1] >= 24, "{counts:?}");
    let error = part(&[all + 8], 1).unwrap_err();
    assert!(matches!(error, GpuError::Multiprocessors { asked, .. } if asked == all + 8), "{error}");
    // Work of a part sees what the whole device allocated.
    let numbers = [1u32, 2, 3];
    let address = gpu.upload(&numbers);
    let device = part(&[16], 0).unwrap();
    let stream = Stream::new(&device, Priority::Default).unwrap();
    let mut back = Pinned::<u32>::new(&device, 3).unwrap();
    // SAFETY: both hold three words until the stream is waited for.
    unsafe { stream.download_async(&mut back, address, 12) }.unwrap();
    stream.synchronize().unwrap();
    assert_eq!(back[..], numbers);
}
