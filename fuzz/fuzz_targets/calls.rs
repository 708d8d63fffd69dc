//! Calls of the C API with any arguments that its contract allows. Memory lies in an arena or is NULL.

mod server;

use std::ffi::{CString, c_int, c_void};
use std::ptr;

use arbitrary::Arbitrary;
use dl_comm_core::capi::{self, CBuffer, CCall, CGroup};

use server::Server;

/// `DL_COMM_ERROR_INTERNAL`.
const INTERNAL: c_int = -9;

/// Number of eight-byte elements in the arena.
const ARENA: usize = 4096;

#[derive(Debug, Arbitrary)]
pub struct TestBuffer {
    src: Option<u16>,
    dst: Option<u16>,
    length: u16,
    /// A length that exceeds any memory; none of it is accessed.
    endless: bool,
    dtype: i8,
    shape: Vec<i64>,
    ndim: Option<i8>,
}

#[derive(Debug, Arbitrary)]
pub enum Team {
    Usual(u8),
    Any(c_int),
}

impl Team {
    fn number(&self) -> c_int {
        match *self {
            Team::Usual(team) => c_int::from(team % 5) - 1,
            // Larger ids would only create more threads.
            Team::Any(team) if (5..64).contains(&team) => 64,
            Team::Any(team) => team,
        }
    }
}

/// The place in the arena, the length and the type of each tensor; or no list.
type TensorList = Option<Vec<(u16, u16, i8)>>;

#[derive(Debug, Arbitrary)]
pub struct Towers {
    lists: Option<Vec<TensorList>>,
    counts: Vec<c_int>,
    ntowers: c_int,
}

#[derive(Debug, Arbitrary)]
pub enum Call {
    Average(Vec<TestBuffer>, Team, Option<String>),
    AverageTowers(Vec<TestBuffer>, u8, Team, Option<String>, f64),
    /// A NULL list with any length.
    NoList(usize, usize, Team),
    Broadcast(Vec<TestBuffer>, c_int, Option<String>, f64),
    Match(Vec<TestBuffer>, bool),
    Gradients(Towers, Team),
    BroadcastTowers(Towers, c_int),
    CreateTeam(Team, i8, c_int),
    EnsureTeam(Team, i8),
    ConfigTeam(Team, c_int, i8, u8, c_int, c_int, c_int),
    Barrier(f64),
    SetTimeout(Team, f64),
    Release(Team, u64),
    Waited(Team),
    Stats(u16, bool),
    Timeline(Option<String>, bool),
    Dump(u16),
    Numbers,
    Init,
    /// A call of `dl_comm_run` or `dl_comm_start`.
    Collective(Collective),
    /// Making a group; sometimes it is kept for a while.
    Group(Option<Vec<c_int>>, Option<String>, Option<Collective>),
    /// A parameter server on a team's ranks.
    Server(Team, Server),
}

#[derive(Debug, Arbitrary)]
pub struct Collective {
    team: Team,
    buffers: Vec<TestBuffer>,
    collective: i8,
    reduce: i8,
    root: i8,
    flags: bool,
    /// Lengths of this rank's only block of each tensor.
    send: Option<u16>,
    receive: Option<u16>,
    name: Option<String>,
    timeout: f64,
    factors: (f64, f64),
    /// Bytes of the structure that the caller knows, in words; `None`: all.
    words: Option<u8>,
    /// By `dl_comm_start`, then whether it is tested before the wait; `None`: by `dl_comm_run`.
    started: Option<bool>,
}

impl Collective {
    /// # Safety
    /// `group` is NULL or valid.
    unsafe fn make(&self, group: *const CGroup) -> c_int {
        let (list, text) = (lists(&self.buffers), name(&self.name));
        // A block fits the memory of its tensor.
        let longest = |buffer: &CBuffer| buffer.length.min(ARENA * 8) % (ARENA * 8);
        let of_each = |count: u16| list.buffers.iter().map(|buffer| usize::from(count).min(longest(buffer))).collect();
        let counts = |count: Option<u16>| count.map(of_each);
        let (send, receive): (Option<Vec<usize>>, Option<Vec<usize>>) = (counts(self.send), counts(self.receive));
        let pointer_of = |counts: &Option<Vec<usize>>| counts.as_ref().map_or(ptr::null(), |counts| counts.as_ptr());
        let size = self.words.map_or(size_of::<CCall>(), |words| usize::from(words % 40) * 8);
        let call = CCall {
            // No byte after the structure is read.
            size: size.min(size_of::<CCall>()),
            collective: c_int::from(self.collective % 13),
            reduce: c_int::from(self.reduce % 16),
            root: c_int::from(self.root % 3),
            flags: c_int::from(self.flags),
            buffers: list.buffers.as_ptr(),
            count: list.buffers.len(),
            send_counts: pointer_of(&send),
            receive_counts: pointer_of(&receive),
            name: pointer(&text),
            timeout: self.timeout,
            device: ptr::null(),
            prescale: self.factors.0,
            postscale: self.factors.1,
            done: None,
            context: ptr::null_mut(),
            allocate: None,
        };
        // SAFETY: the arguments follow dl_comm.h; the memory lives until the call has ended.
        unsafe {
            let Some(tests) = self.started else { return capi::dl_comm_run(group, &call) };
            let mut work = ptr::null_mut();
            let code = capi::dl_comm_start(group, &call, &mut work);
            if code < 0 {
                assert!(work.is_null());
                return code;
            }
            let mut ended = 0;
            let tested = if tests { capi::dl_comm_test(work, &mut ended) } else { 0 };
            let waited = capi::dl_comm_wait(work, 0.0);
            assert!(ended == 0 || tested == waited);
            assert_eq!(capi::dl_comm_work_free(work), 0);
            waited
        }
    }
}

struct Lists {
    buffers: Vec<CBuffer>,
    _arena: Vec<u64>,
}

/// At most eight buffers for `buffers`, in a new arena.
fn lists(buffers: &[TestBuffer]) -> Lists {
    let mut arena = vec![0u64; ARENA];
    let base = arena.as_mut_ptr().cast::<u8>();
    let buffer = |spec: &TestBuffer| {
        // The space after the later of both offsets, in elements of eight bytes.
        let at = |at: u16| usize::from(at) % (ARENA * 8);
        let last = spec.src.into_iter().chain(spec.dst).map(at).max().unwrap_or(0);
        let capacity = (ARENA * 8 - last) / 8;
        let length = if spec.endless {
            usize::MAX / 8 + usize::from(spec.length)
        } else {
            usize::from(spec.length) % (capacity + 1)
        };
        let pointer = |offset: Option<u16>| offset.map_or(ptr::null_mut(), |offset| base.wrapping_add(at(offset)));
        let ndim = spec.ndim.map_or(spec.shape.len() as c_int, |ndim| c_int::from(ndim).min(spec.shape.len() as c_int));
        CBuffer {
            src: pointer(spec.src).cast(),
            dst: pointer(spec.dst).cast(),
            length,
            // Elements of eight bytes, so that an endless length exceeds the address space.
            dtype: if spec.endless { 3 } else { c_int::from(spec.dtype % 12) },
            ndim,
            shape: if spec.ndim == Some(0) { ptr::null() } else { spec.shape.as_ptr() },
        }
    };
    Lists { buffers: buffers.iter().take(8).map(buffer).collect(), _arena: arena }
}

fn name(text: &Option<String>) -> Option<CString> {
    text.as_ref().map(|text| CString::new(text.replace('\0', "")).expect("there is no NUL"))
}

fn pointer(text: &Option<CString>) -> *const i8 {
    text.as_ref().map_or(ptr::null(), |text| text.as_ptr())
}

impl Towers {
    /// Calls `function` with the arguments of `dl_comm_gradients`.
    fn with(
        &self,
        function: impl FnOnce(*mut *mut *mut c_void, *mut *mut c_int, *mut *mut c_int, *mut c_int, c_int) -> c_int,
    ) -> c_int {
        let mut arena = vec![0u64; ARENA];
        let base = arena.as_mut_ptr().cast::<u8>();
        let Some(lists) = &self.lists else {
            return function(ptr::null_mut(), ptr::null_mut(), ptr::null_mut(), ptr::null_mut(), self.ntowers);
        };
        let (mut tensors, mut lengths, mut dtypes) = (Vec::new(), Vec::new(), Vec::new());
        let mut counts = Vec::new();
        for (tower, list) in lists.iter().take(4).enumerate() {
            let list = list.as_ref().map(|list| &list[..list.len().min(8)]);
            // At most the list's length; any count without a list.
            let count = self.counts.get(tower).copied().unwrap_or(c_int::MAX);
            counts.push(list.map_or(count, |list| count.min(list.len() as c_int)));
            let entries = list.unwrap_or_default().iter();
            let at = |at: u16| usize::from(at) % (ARENA * 8);
            tensors
                .push(entries.clone().map(|entry| base.wrapping_add(at(entry.0)).cast::<c_void>()).collect::<Vec<_>>());
            let length = |entry: &(u16, u16, i8)| (usize::from(entry.1) % ((ARENA * 8 - at(entry.0)) / 8 + 1)) as c_int;
            lengths.push(entries.clone().map(length).collect::<Vec<_>>());
            dtypes.push(entries.map(|entry| c_int::from(entry.2 % 12)).collect::<Vec<_>>());
        }
        let gone = |tower: usize| lists[tower].is_none();
        let mut tensors: Vec<_> = tensors
            .iter_mut()
            .enumerate()
            .map(|(tower, list)| if gone(tower) { ptr::null_mut() } else { list.as_mut_ptr() })
            .collect();
        let mut lengths: Vec<_> = lengths.iter_mut().map(Vec::as_mut_ptr).collect();
        let mut dtypes: Vec<_> = dtypes.iter_mut().map(Vec::as_mut_ptr).collect();
        let ntowers = self.ntowers.min(tensors.len() as c_int);
        function(tensors.as_mut_ptr(), lengths.as_mut_ptr(), dtypes.as_mut_ptr(), counts.as_mut_ptr(), ntowers)
    }
}

impl Call {
    /// Makes the call and returns its code.
    pub fn make(&self) -> c_int {
        // SAFETY: arguments follow dl_comm.h: NULL, memory of the given length, or a length that no memory can have.
        unsafe {
            match self {
                Call::Average(buffers, team, text) => {
                    let (list, text) = (lists(buffers), name(text));
                    capi::dl_comm_average(list.buffers.as_ptr(), list.buffers.len(), team.number(), pointer(&text))
                }
                Call::AverageTowers(buffers, ntowers, team, text, timeout) => {
                    let (list, text) = (lists(buffers), name(text));
                    let ntowers = usize::from(ntowers % 5);
                    let count = list.buffers.len() / ntowers.max(1);
                    let buffers = list.buffers.as_ptr();
                    capi::dl_comm_average_towers(buffers, count, ntowers, team.number(), pointer(&text), *timeout)
                }
                Call::NoList(count, ntowers, team) => {
                    let code = capi::dl_comm_average(ptr::null(), *count, team.number(), ptr::null());
                    let towers =
                        capi::dl_comm_average_towers(ptr::null(), *count, *ntowers, team.number(), ptr::null(), -1.0);
                    assert!(code < 0 && towers < 0);
                    code
                }
                Call::Broadcast(buffers, root, text, timeout) => {
                    let (list, text) = (lists(buffers), name(text));
                    let buffers = list.buffers.as_ptr();
                    capi::dl_comm_broadcast_buffers(buffers, list.buffers.len(), *root, pointer(&text), *timeout)
                }
                Call::Match(buffers, verbose) => {
                    let list = lists(buffers);
                    let buffers = list.buffers.as_ptr();
                    capi::dl_comm_check_buffers_match(buffers, list.buffers.len(), c_int::from(*verbose))
                }
                Call::Gradients(towers, team) => {
                    towers.with(|a, b, c, d, e| capi::dl_comm_gradients(a, b, c, d, e, team.number()))
                }
                Call::BroadcastTowers(towers, root) => {
                    towers.with(|a, b, c, d, e| capi::dl_comm_broadcast(a, b, c, d, e, *root))
                }
                Call::CreateTeam(team, threads, level) => {
                    capi::dl_comm_create_team(team.number(), c_int::from(threads % 4), *level)
                }
                Call::EnsureTeam(team, threads) => capi::dl_comm_ensure_team(team.number(), c_int::from(threads % 4)),
                Call::ConfigTeam(team, alg, ksteps, steps, verbosity, freq, cooldown) => capi::dl_comm_config_team(
                    team.number(),
                    *alg,
                    c_int::from(*ksteps),
                    c_int::from(*steps),
                    // Never print.
                    (*verbosity).min(0),
                    *freq,
                    *cooldown,
                ),
                Call::Barrier(timeout) => capi::dl_comm_barrier_timeout(*timeout),
                Call::SetTimeout(team, timeout) => capi::dl_comm_set_timeout(team.number(), *timeout),
                Call::Release(team, owner) => capi::dl_comm_release_owner(team.number(), *owner),
                Call::Waited(team) => capi::dl_comm_get_waited(team.number()).min(0.0) as c_int,
                Call::Stats(capacity, null) => {
                    let mut text = vec![0; usize::from(*capacity)];
                    let buffer = if *null { ptr::null_mut() } else { text.as_mut_ptr() };
                    capi::dl_comm_stats(buffer, text.len())
                }
                Call::Timeline(folder, start) => {
                    // No file can exist below /dev/null: only the handling of the name is tested.
                    let folder = folder.as_ref().map(|folder| format!("/dev/null/{folder}"));
                    if *start {
                        capi::dl_comm_timeline_start(pointer(&name(&folder)))
                    } else {
                        capi::dl_comm_timeline_stop()
                    }
                }
                Call::Dump(capacity) => {
                    let mut text = vec![0; usize::from(*capacity)];
                    capi::dl_comm_dump(c"/dev/null/dump".as_ptr(), text.as_mut_ptr(), text.len())
                }
                Call::Numbers => {
                    let numbers = [capi::dl_comm_get_rank(), capi::dl_comm_get_nranks(), capi::dl_comm_localrank()];
                    let more =
                        [capi::dl_comm_get_local_nranks(), capi::dl_comm_get_nhosts(), capi::dl_comm_get_nteams()];
                    numbers.into_iter().chain(more).min().unwrap_or(0)
                }
                Call::Init => capi::dl_comm_init(),
                Call::Collective(collective) => {
                    let mut group = ptr::null_mut();
                    let code = capi::dl_comm_team_group(collective.team.number(), &mut group);
                    assert_eq!(code == 0, !group.is_null());
                    let code = if code == 0 { collective.make(group) } else { code };
                    capi::dl_comm_group_free(group);
                    code
                }
                Call::Server(team, server) => {
                    let mut group = ptr::null_mut();
                    let code = capi::dl_comm_team_group(team.number(), &mut group);
                    let code = if code == 0 { server.make(group) } else { code };
                    capi::dl_comm_group_free(group);
                    code
                }
                Call::Group(ranks, text, collective) => {
                    let (mut group, text) = (ptr::null_mut(), name(text));
                    let list = ranks.as_ref().map_or(ptr::null(), |ranks| ranks.as_ptr());
                    let count = ranks.as_ref().map_or(0, |ranks| ranks.len() as c_int);
                    // The text is a bad algorithm too, unless it is empty.
                    let options = capi::CGroupOptions {
                        size: size_of::<capi::CGroupOptions>(),
                        threads: count,
                        timeout: f64::from(count),
                        algorithm: pointer(&text),
                        gpu_path: ptr::null(),
                    };
                    let options = if count % 2 == 0 { ptr::null() } else { &raw const options };
                    let code = capi::dl_comm_group_create_with(list, count, pointer(&text), options, &mut group);
                    assert_eq!(code == 0, !group.is_null());
                    let made = collective.as_ref().filter(|_| code == 0);
                    let code = made.map_or(code, |collective| collective.make(group));
                    capi::dl_comm_group_free(group);
                    code
                }
            }
        }
    }
}

/// The message of this thread's last error.
pub fn last_error() -> String {
    // SAFETY: the text is a C string until the next error.
    unsafe { std::ffi::CStr::from_ptr(capi::dl_comm_last_error()) }.to_string_lossy().into_owned()
}

/// Checks that a code is one of the header, and no internal error.
fn check(code: c_int, call: &dyn std::fmt::Debug) {
    if code < 0 {
        let error = last_error();
        assert!(!error.is_empty() && code != INTERNAL, "{code} {error} of {call:?}");
    }
}

/// Makes the calls and checks their codes.
pub fn make(calls: &[Call]) {
    for call in calls.iter().take(20) {
        check(call.make(), call);
    }
}
